"""What people do with an export: generate, pipelines and chats of transformers, TRL where it is installed,
and back by --init-from.
"""

import json
import random
import re

import jinja2
import pytest
import torch
from runs import Trainer, evaluations_of
from test_model_gpt2_mlm import export, tiny

from data import Dataset
from model import GPT2, HRM
from prepare.pipeline import prepare
from vocab.tokenizer import load_tokenizer, prompt_ids, with_markers
from vocab.vocabulary import EOT, RESPONSE
from weights.llama_cpp import to_gguf

transformers = pytest.importorskip("transformers", minversion="5.23")

SHAPE = {"seq_len": 64, "max_new_tokens": 8, "lr": 1e-2, "steps": 60, "eval_every": 60, "eval_batches": 0}
TRAINERS = {"gpt2": Trainer("train_gpt2.py", **SHAPE),
            "hrm": Trainer("train_hrm.py", **SHAPE | {"ff": 64, "h_cycles": 1, "l_cycles": 1, "steps": 240})}
QUESTIONS = ["7 and 1?", "what is 12 and 1?", "30 and 1?"]


@pytest.fixture(scope="module", params=["gpt2", "hrm"])
def chat(request, tmp_path_factory):
    """A trainer, its run on pairs, and their data."""
    path = tmp_path_factory.mktemp("clients")
    rows = [{"q": f"{'what is ' * (n % 2)}{n} and 1?", "a": f"it is {n + 1}"} for n in range(300)]
    (path / "qa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shards = prepare(f"jsonl:{path}/qa.jsonl", path / "shards", "bytes", prompt_field="q",
                     response_field="a", row=64, val_split="hash:0.1")
    trainer = TRAINERS[request.param]
    for flags in {"attention": "isolated"}, {"export": True}:
        done = trainer.train(0, shards, path / "run", **flags)
        assert done.code == 0, done.out
    return trainer, path / "run", shards


def opened(run):
    directory = run / "hf"
    return (transformers.AutoModelForCausalLM.from_pretrained(directory).eval(),
            transformers.AutoTokenizer.from_pretrained(directory, padding_side="left"))


def asked(chat, prompt: str) -> str:
    """The answer of --prompt, without the prompt."""
    trainer, run, shards = chat
    done = trainer.train(0, shards, run, prompt=prompt, temperature=0)
    assert done.code == 0, done.out
    return done.out.rpartition(prompt + "\n")[2].rstrip("\n")


@pytest.mark.full
def test_chats_and_batches_answer_as_prompt_does(chat):
    """One turn has the ids of --prompt; a batch with padding on the left gives each its own answer."""
    model, words = opened(chat[1])
    answers = [asked(chat, question) for question in QUESTIONS]
    assert len(set(answers)) > 1
    turns = [[{"role": "user", "content": question}] for question in QUESTIONS]
    ids = words.apply_chat_template(turns[0], add_generation_prompt=True)["input_ids"]
    ours = load_tokenizer(str(chat[1]))
    assert ids == prompt_ids(ours, QUESTIONS[0]).tolist()
    batch = words.apply_chat_template(turns, add_generation_prompt=True, padding=True, return_tensors="pt",
                                      return_dict=True)
    assert not batch["attention_mask"].all()
    new = model.generate(**batch, max_new_tokens=8, do_sample=False)[:, batch["input_ids"].size(1):]
    assert words.batch_decode(new, skip_special_tokens=True) == answers
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=words)
    found = pipe(turns[1], max_new_tokens=8, do_sample=False)[0]["generated_text"]
    assert found[-1] == {"role": "assistant", "content": answers[1]}


def talks_of(*texts: str) -> list[dict]:
    """Messages of who is named by the first letters."""
    roles = {role[0]: role for role in ("system", "user", "assistant", "tool")}
    return [{"role": roles[text[0]], "content": text[1:]} for text in texts]


TALKS = [talks_of("u1?", "a2", "u3?", "a4", "u5?", "a6"), talks_of("sBe short. ", "u1?", "a2", "u3?", "a4"),
         talks_of("ahello", "u1?", "a2"), talks_of("sA", "sB", "u1?", "u2?", "a3", "a4", "sC", "a5"),
         talks_of("u1?", "a", "t42", "a2"), talks_of("u{{ 1 }}\n", "a <s>\n", "u\n", "a ")]


@pytest.mark.parametrize("talk", TALKS)
def test_a_chat_of_any_turns_has_the_ids_of_a_row(talk, tmp_path):
    """With and without its answer, in transformers and in what plain Jinja makes of the template of a GGUF;
    and only the answer is learned.
    """
    ids = with_markers(load_tokenizer("bytes"))
    model = tiny(GPT2, 0, vocab_size=ids.vocab_size, **ids.marker_ids)
    export(model, ids, tmp_path)
    words = transformers.AutoTokenizer.from_pretrained(tmp_path)
    (tmp_path / "x.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    shards = prepare(f"jsonl:{tmp_path}/x.jsonl", tmp_path / "out", "bytes", prompt_field="messages",
                     response_field="messages", row=64, val_split="hash:0.000001")
    rows = Dataset([shards], 64).train
    text = "".join(ids.decode(x) for _, grid, _ in rows.grids for x in grid)
    trained = {part for part in text.split(EOT) if part}
    plain = jinja2.Environment().from_string(gguf_template(model, ids, tmp_path / "m.gguf"))
    answers = [at for at, m in enumerate(talk) if m["role"] == "assistant" and m["content"] and at]
    assert len(trained) == len(answers)
    for at in answers:
        asked = words.apply_chat_template(talk[:at], add_generation_prompt=True, tokenize=False)
        whole = words.apply_chat_template(talk[:at + 1], tokenize=False)
        assert whole == f"{asked}{talk[at]['content']}{EOT}" and whole.split(EOT)[1] in trained
        found = words.apply_chat_template(talk[:at], add_generation_prompt=True, return_dict=False)
        assert found == prompt_ids(ids, asked.removeprefix(EOT).removesuffix(RESPONSE)).tolist()
        marked = words.apply_chat_template(talk[:at + 1], return_dict=True, return_assistant_tokens_mask=True)
        assert sum(marked["assistant_masks"]) == len(ids.encode(talk[at]["content"])) + 1
        for wanted, turns, generate in (asked, talk[:at], True), (whole, talk[:at + 1], False):
            assert wanted == plain.render(messages=turns, add_generation_prompt=generate, bos_token=EOT,
                                          eos_token=EOT)


def gguf_template(model, tokenizer, path) -> str:
    gguf = pytest.importorskip("gguf")
    to_gguf(model, path, tokenizer)
    return gguf.GGUFReader(path).fields["tokenizer.chat_template"].contents()


def test_the_parts_of_a_message_are_text_and_the_answers_are_marked(tmp_path):
    ids = with_markers(load_tokenizer("bytes"))
    export(tiny(GPT2, 0, vocab_size=ids.vocab_size, **ids.marker_ids), ids, tmp_path)
    words = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert words.pad_token == "[MASK]" and words.pad_token_id == ids.mask != words.eos_token_id
    parts = [{"type": "text", "text": "1 and "}, {"type": "text", "text": "1?"}]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": "2"}]
    assert words.apply_chat_template(turns, tokenize=False) == f"{EOT}1 and 1?{RESPONSE}2{EOT}"
    marked = words.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
    assert sum(marked["assistant_masks"]) == 2 and marked["assistant_masks"][-2:] == [1, 1]


@pytest.mark.parametrize("condition", ["Be brief.", "Be brief. ", "poet", "Answer:\n"])
def test_a_chat_has_the_ids_that_were_trained(condition, tmp_path):
    """Of a tokenizer of the Llama kind, which puts a blank before a text, and of a condition as a system
    message.
    """
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = tokenizers.decoders.Sequence([
        tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.ByteFallback(),
        tokenizers.decoders.Fuse(), tokenizers.decoders.Strip(" ", 1, 0)])
    special = ["<unk>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    made.train_from_iterator(["what is two and one? it is three. be brief. a poet says so"] * 20,
                             tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=special))
    spec = json.loads(made.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if not token["content"].startswith("<0x")]
    (tmp_path / "llama.json").write_text(json.dumps(spec))
    ids = with_markers(load_tokenizer(str(tmp_path / "llama.json")))
    export(tiny(GPT2, 0, vocab_size=ids.vocab_size, padded_vocab=512, **ids.marker_ids), ids, tmp_path / "hf")
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    turns = [{"role": "system", "content": condition}, {"role": "user", "content": "what is two?"}]
    found = words.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    assert found == prompt_ids(ids, "what is two?", condition).tolist()
    answered = [*turns, {"role": "assistant", "content": "it is three"}]
    whole = words.apply_chat_template(answered, return_dict=False)
    assert whole == [*found, *ids.encode("it is three").tolist(), words.eos_token_id]
    assert words("what is two?")["input_ids"] == prompt_ids(ids, "what is two?").tolist()


@pytest.mark.full
def test_the_export_comes_back(chat, tmp_path):
    trainer, run, shards = chat
    done = trainer.train(0, shards, tmp_path / "back", init_from=f"hf:{run / 'hf'}", lr=0, steps=1, warmup=0,
                         eval_every=1, attention="isolated", d_model=None, n_head=None, n_layer=None)
    assert done.code == 0 and "WARNING" not in done.out, done.out
    before, after = (evaluations_of(out)[-1]["val_loss"] for out in (run, tmp_path / "back"))
    assert after == pytest.approx(before, abs=1e-5)


@pytest.mark.full
def test_trl_learns_the_answers_to_the_questions(chat, tmp_path):
    """SFTTrainer for two steps on chats; what it has saved starts a run here."""
    trl = pytest.importorskip("trl", reason="pip install trl")
    import datasets
    trainer, run, shards = chat
    model, words = opened(run)
    rows = [{"prompt": [{"role": "user", "content": f"{n} and 1?"}],
             "completion": [{"role": "assistant", "content": f"it is {n + 1}"}]} for n in range(16)]
    config = trl.SFTConfig(str(tmp_path / "trl"), max_steps=2, per_device_train_batch_size=4, logging_steps=1,
                           report_to=[], use_cpu=True, bf16=False, save_strategy="no")
    sft = trl.SFTTrainer(model, config, train_dataset=datasets.Dataset.from_list(rows),
                         processing_class=words)
    text = words.decode(sft.train_dataset[3]["input_ids"])
    assert text == f"{EOT}3 and 1?{RESPONSE}it is 4{EOT}"
    sft.train()
    losses = [record["loss"] for record in sft.state.log_history if "loss" in record]
    assert len(losses) == 2 and max(losses) < 1.5  # it knows them; without their questions they have 5 to 7
    sft.save_model(str(tmp_path / "tuned"))
    done = trainer.train(0, shards, tmp_path / "back", init_from=f"hf:{tmp_path / 'tuned'}", lr=0, steps=1,
                         eval_every=1, attention="isolated", d_model=None, n_head=None, n_layer=None)
    assert done.code == 0, done.out
    assert not torch.isnan(torch.tensor(evaluations_of(tmp_path / "back")[-1]["val_loss"]))
    assert re.search(r"starting from hf:", done.out)


def sample(words, question: str, answer: str) -> dict:
    """As the guide has it."""
    row, asked = dict(words(question, answer)), len(words(question)["input_ids"])
    return row | {"labels": [-100] * asked + row["input_ids"][asked:]}


def losses_of_letters(family, directory, *, in_sight: bool = False, **changes) -> tuple[float, float]:
    """An export with `changes`, tuned on answers of random letters: the loss of 20 other ones in the Trainer,
    and as they are written token by token. Nobody can know the letters: in the mean the 13 tokens of an
    answer have a loss of 12 / 13 x ln 8 = 1.92, unless it is in sight.
    """
    pytest.importorskip("accelerate", reason="pip install accelerate")
    ids = with_markers(load_tokenizer("bytes"))
    torch.manual_seed(0)
    shape = {"seq_len": 64, "n_layer": 1, "n_head": 2, "d_model": 32, **ids.marker_ids}
    if family is HRM:
        shape |= {"ff": 64, "h_cycles": 1, "l_cycles": 1, "attention": "prefix"}
    export(family(family.Config(vocab_size=ids.vocab_size, padded_vocab=320, **shape)), ids, directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, **changes)
    words = transformers.AutoTokenizer.from_pretrained(directory, padding_side="right")
    pick = random.Random(5)
    pairs = [(f"code {pick.randrange(1000)}", "".join(pick.choices("abcdefgh", k=12))) for _ in range(2000)]
    rows = [sample(words, *pair) for pair in pairs]
    if in_sight:  # the types of one text with question and answer
        rows = [row | {"token_type_ids": [1] * len(row["labels"])} for row in rows]
    settings = transformers.TrainingArguments(
        str(directory / "tuned"), max_steps=160, per_device_train_batch_size=16, learning_rate=1e-2,
        lr_scheduler_type="constant", report_to=[], use_cpu=True, save_strategy="no")
    trainer = transformers.Trainer(model, settings, train_dataset=rows[20:],
                                   data_collator=transformers.DataCollatorForSeq2Seq(words))
    trainer.train()
    trained, losses = trainer.evaluate(rows[:20])["eval_loss"], []
    for (question, _), row in zip(pairs, rows[:20]):
        with torch.no_grad():
            told = model(**words(question, return_tensors="pt"), use_cache=True)
            for token in torch.tensor([label for label in row["labels"] if label >= 0]):
                losses.append(torch.nn.functional.cross_entropy(told.logits[0, -1], token))
                told = model(token.view(1, 1), past_key_values=told.past_key_values, use_cache=True)
    return trained, float(torch.stack(losses).mean())


@pytest.mark.parametrize("family", [GPT2, HRM])
def test_an_answer_that_the_trainer_learns_has_the_loss_of_one_that_is_written(family, tmp_path):
    trained, written = losses_of_letters(family, tmp_path)
    assert trained == pytest.approx(1.92, abs=0.1) and written == pytest.approx(trained, abs=1e-4)


def test_an_answer_in_sight_is_not_learned(tmp_path):
    """The control; and the same samples where the model reads all from left to right."""
    trained, written = losses_of_letters(HRM, tmp_path / "seen", in_sight=True)
    assert trained < 1 and written > 3
    trained, written = losses_of_letters(HRM, tmp_path / "causal", in_sight=True, prefix_lm=False)
    assert trained == pytest.approx(1.92, abs=0.1) and written == pytest.approx(trained, abs=1e-4)
