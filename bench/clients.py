"""Checks what transformers and TRL make of the export of a run on pairs, in each way to use it.

    pip install transformers trl accelerate && python bench/clients.py runs/NAME questions.jsonl

The run needs its export in hf/. For each way to ask, prints the types that reach the model, and how many
answers to the first --rows (field q) equal those of --prompt. For each way to tune, prints the types, what is
learned of a sample, whether an answer is hidden from itself, and two losses of --others (answers) after
--steps on answers of random letters: as trained, and as generated. Nobody can guess random letters, so about
2.0 is right; a first loss near 0 means that the model sees the answer. To compare versions, copy this file
into the other one's bench/.
"""

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.nn.functional import cross_entropy as loss

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "helpers")]

try:
    import accelerate  # noqa: F401
    import datasets
    import transformers
    import trl
except ImportError as error:
    sys.exit(f"error: {error}: pip install transformers trl accelerate")

from model import GPT2, HRM  # noqa: E402
from weights.sampling import samples_of  # noqa: E402
from weights.use import load_run  # noqa: E402

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("run", type=Path)
parser.add_argument("questions", type=Path, help="JSON lines with q")
parser.add_argument("--rows", type=int, default=300, help="number of questions to ask (300)")
parser.add_argument("--steps", type=int, default=160, help="training steps for each way to tune (160)")
parser.add_argument("--others", type=int, default=100, help="answers held out of training (100)")
args = parser.parse_args()
HF = args.run / "hf"
TOKENIZER = transformers.AutoTokenizer.from_pretrained(HF)
RESPONSE = "<|response|>"
READ = "input_ids", "attention_mask", "token_type_ids"
GREEDY = {"max_new_tokens": 12, "do_sample": False}


def opened(**changes):
    return transformers.AutoModelForCausalLM.from_pretrained(HF, **changes).eval()


def chat(question: str, *answer: str) -> list[dict]:
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant"), (question, *answer))]


def rendered(turns: list, **options):
    return TOKENIZER.apply_chat_template(turns, **{"return_dict": True} | options)


def types_of(batch) -> str:
    return "none" if batch is None else "".join(map(str, batch[0].tolist()))


def ask(is_hrm: bool):
    model, (ours, tokenizer) = opened(), load_run(HRM if is_hrm else GPT2, args.run)
    ours.compute_dtype = torch.float32
    questions = [json.loads(line)["q"] for line in open(args.questions)][:args.rows]
    sampling = SimpleNamespace(max_new_tokens=12, temperature=0, top_k=0, seed=0, condition="")
    wanted = ["".join(samples_of(ours, tokenizer, "cpu", q, sampling, stop=True)[0]) for q in questions]
    pipe = transformers.pipeline("text-generation", model=model,
                                 tokenizer=transformers.AutoTokenizer.from_pretrained(HF))  # it sets the side

    def generated(inputs, **options) -> list[str]:
        ids = model.generate(**inputs, **GREEDY, **options)[:, inputs["input_ids"].size(1):]
        return TOKENIZER.batch_decode(ids, skip_special_tokens=True)

    def plain(texts, **options):
        return generated(TOKENIZER(texts, padding=True, return_tensors="pt"), **options)

    def without_types(texts):
        inputs = TOKENIZER(texts, return_tensors="pt")
        return generated({name: inputs[name] for name in ("input_ids", "attention_mask")})

    def as_chat(texts):
        turns = [chat(text) for text in texts]
        return generated(rendered(turns, add_generation_prompt=True, padding=True, return_tensors="pt"))

    def as_ids(texts):
        ids = rendered(chat(texts[0]), add_generation_prompt=True, return_dict=False, return_tensors="pt")
        return generated({"input_ids": ids})

    def piped(texts):
        return [found[0]["generated_text"] for found in pipe(texts, return_full_text=False, **GREEDY, **size)]

    def piped_chat(texts):
        turns = [chat(text) for text in texts]
        return [found[0]["generated_text"][-1]["content"] for found in pipe(turns, **GREEDY, **size)]

    ways = {"tokenizer(q)": (plain, 1), "the same without its types": (without_types, 1),
            "chat template, return_dict=True": (as_chat, 1), "chat template, return_dict=False": (as_ids, 1),
            "a padded batch of 20": (plain, 20), "a padded batch of 20 chats": (as_chat, 20),
            "three beams": (lambda texts: plain(texts, num_beams=3), 1), "pipeline(text)": (piped, 1),
            "pipeline(messages)": (piped_chat, 1), "pipeline(text), batch_size=8": (piped, 8),
            "pipeline(messages), batch_size=8": (piped_chat, 8)}
    for name, (way, n) in ways.items():
        seen, found, size = [], [], {"batch_size": n}

        def see(_, args, options, seen=seen):
            seen.append(options.get("token_type_ids"))

        hook = model.register_forward_pre_hook(see, with_kwargs=True)
        for i in range(0, len(questions), n):
            found += way(questions[i:i + n])
        hook.remove()
        right = sum(a == b for a, b in zip(found, wanted, strict=True))
        print(f"| {name} | {types_of(seen[0])} | {right} of {len(wanted)} |", flush=True)


def with_labels(row, asked: int) -> dict:
    return dict(row) | {"labels": [-100] * asked + row["input_ids"][asked:]}


def masked(question: str, answer: str) -> dict:
    row = dict(rendered(chat(question, answer), return_assistant_tokens_mask=True))
    marks = row.pop("assistant_masks")
    if not any(marks):
        raise ValueError("the mask marks nothing")
    return row | {"labels": [token if mark else -100 for token, mark in zip(row["input_ids"], marks)]}


def asked_tokens(question: str) -> int:
    return len(TOKENIZER(question)["input_ids"])


def hidden(model, batch) -> bool:
    """Whether changing the last token of an answer changes nothing before it."""
    rows = {name: batch[name][:1] for name in READ if name in batch}
    last = int(rows["attention_mask"][0].nonzero().max()) - 1
    changed = rows | {"input_ids": rows["input_ids"].clone()}
    changed["input_ids"][0, last] -= 1
    a, b = (model(**inputs).logits[0, last - 6:last] for inputs in (rows, changed))
    return bool((a - b).abs().max() < 1e-4)


@torch.no_grad()
def losses(model, trainer, pairs) -> tuple[float, float]:
    """Losses of the answers' tokens, in the trainer's batches, and generated one by one."""
    told, written, sign = [], [], TOKENIZER.convert_tokens_to_ids(RESPONSE)
    for batch in trainer.get_eval_dataloader():
        ids = batch["input_ids"]
        inputs = {name: batch[name] for name in READ if name in batch}
        logits, first = model(**inputs).logits, (ids == sign).int().argmax(1, keepdim=True)
        answer = (torch.arange(ids.size(1)) > first) & (batch["attention_mask"] == 1)
        answer = answer[:, 1:]
        told.append(loss(logits[:, :-1][answer], ids[:, 1:][answer], reduction="none"))
    for question, answer in pairs:
        out = model(**TOKENIZER(question, return_tensors="pt"), use_cache=True)
        whole = rendered(chat(question, answer), return_dict=False)
        for token in torch.tensor(whole[asked_tokens(question):]):
            written.append(loss(out.logits[0, -1], token))
            out = model(token.view(1, 1), past_key_values=out.past_key_values, use_cache=True)
    return float(torch.cat(told).mean()), float(torch.stack(written).mean())


def tune(is_hrm: bool):
    pick = random.Random(5)
    pairs = [(f"code {pick.randint(10, 99)}", "".join(pick.choices("abcdefgh", k=12)))
             for _ in range(32 * args.steps + args.others)]
    side, folder = TOKENIZER.padding_side, tempfile.mkdtemp()
    common = {"output_dir": folder, "max_steps": args.steps, "per_device_train_batch_size": 32,
              "learning_rate": 1e-2, "lr_scheduler_type": "constant", "report_to": [], "use_cpu": True,
              "save_strategy": "no", "disable_tqdm": True, "logging_steps": args.steps}

    def parts(form) -> dict:
        rows = [form(*pair) for pair in pairs]
        return {"train_dataset": datasets.Dataset.from_list(rows[args.others:]),
                "eval_dataset": datasets.Dataset.from_list(rows[:args.others])}

    def plain(model, form):
        if "labels" in form(*pairs[0]):
            collator = transformers.DataCollatorForSeq2Seq(TOKENIZER)
        else:
            collator = transformers.DataCollatorForLanguageModeling(TOKENIZER, mlm=False)
        return transformers.Trainer(model, transformers.TrainingArguments(**common), **parts(form),
                                    data_collator=collator)

    def sft(model, form, **options):
        settings = trl.SFTConfig(**common, bf16=False, **options)
        return trl.SFTTrainer(model, settings, **parts(form), processing_class=TOKENIZER)

    def marked_text(q, a):
        return dict(TOKENIZER(q + RESPONSE + a))

    def whole_text(q, a):
        return dict(TOKENIZER(rendered(chat(q, a), tokenize=False), add_special_tokens=False))

    def messages(q, a):
        return {"messages": chat(q, a)}

    def completion(q, a):
        return {"prompt": chat(q), "completion": chat(q, a)[1:]}

    def guide(q, a):
        return with_labels(TOKENIZER(q, a), asked_tokens(q))

    ways = {
        "Trainer: one text of the template": (plain, whole_text),
        "Trainer: one text, tokenizer(q + marker + a)": (plain, marked_text),
        "Trainer: tokenizer(q, a)": (plain, lambda q, a: dict(TOKENIZER(q, a))),
        "Trainer: tokenizer(q, a), labels of the answer": (plain, guide),
        "the same, padded on the right (the guide)": (plain, guide, {}, "right"),
        "Trainer: chat template, labels of the answer": (
            plain, lambda q, a: with_labels(rendered(chat(q, a)), asked_tokens(q))),
        "Trainer: chat template, return_assistant_tokens_mask": (plain, masked),
        "TRL: messages": (sft, messages),
        "TRL: messages, assistant_only_loss": (
            lambda model, form: sft(model, form, assistant_only_loss=True), messages),
        "TRL: prompt and completion": (sft, completion)}
    if is_hrm:
        causal = {"prefix_lm": False}
        ways["the same, prefix_lm=False (the guide)"] = (sft, completion, causal)
        ways["Trainer: chat template with the mask, prefix_lm=False"] = (plain, masked, causal)
    for name, (make, form, *rest) in ways.items():
        transformers.set_seed(0)
        TOKENIZER.padding_side = rest[1] if rest[1:] else side
        model = opened(**rest[0] if rest else {})
        try:
            trainer = make(model, form)
        except ValueError as error:
            print(f"| {name} | refused: {error} |", flush=True)
            continue
        batch = next(iter(trainer.get_eval_dataloader()))
        learned = TOKENIZER.decode(batch["input_ids"][0][batch["labels"][0] != -100])
        line = f"| {name} | {types_of(batch.get('token_type_ids'))} | `{learned}` |"
        if TOKENIZER.convert_tokens_to_ids(RESPONSE) not in batch["input_ids"]:
            print(line, "no marker: another sample than what was trained |", flush=True)
            continue
        with torch.no_grad():
            line += f" {'yes' if hidden(model, batch) else 'no'} |"
        trainer.train()
        told, written = losses(model.eval(), trainer, pairs[:args.others])
        print(f"{line} {told:.3f} | {written:.3f} |", flush=True)


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    known = json.loads((HF / "config.json").read_text())["model_type"] == "hrm_text"
    ask(known)
    tune(known)
