"""The log-likelihoods of an exported model: those of transformers, and of EleutherAI's lm_eval where that is
installed (pip install lm_eval accelerate peft), equal ours of EOT and the text. So does the guide's command.
"""

import json
import re
import shlex

import pytest
import torch
from conftest import ROOT
from test_model import hrm, transformers  # noqa: F401 (a fixture)
from test_model_gpt2_mlm import gpt2

from vocab.tokenizer import load_tokenizer, prompt_ids, with_markers
from weights.huggingface import to_hf

TEXTS = ["def main():\n    return 1\n", "import sys\nprint(sys.argv)\n", "über alles, sat on 12 mats"]
BOUND = 1e-4  # nats a token
each_family = pytest.mark.parametrize("make", [gpt2, hrm])


@pytest.fixture
def exported(make, tmp_path):
    tokenizer = load_tokenizer("bytes")
    model = make(vocab_size=tokenizer.vocab_size, padded_vocab=320, seq_len=64).eval()
    to_hf(model, tmp_path / "hf", tokenizer)
    return model, tokenizer, tmp_path / "hf"


@torch.no_grad()
def log_likelihood(model, tokenizer, text: str, context: str = "") -> float:
    """Of text after <|endoftext|> and a context."""
    ids = torch.tensor([[tokenizer.eot, *tokenizer.encode(context + text).tolist()]])
    logits = model(ids[:, :-1])[0, :, :tokenizer.vocab_size]
    each = logits.log_softmax(-1).gather(1, ids[0, 1:, None])
    return each[len(tokenizer.encode(context)):].sum().item()


def error(theirs: float, ours: float, tokenizer, text: str) -> float:
    return abs(theirs - ours) / len(tokenizer.encode(text))


@each_family
def test_transformers_scores_a_document_as_we_do(exported, transformers):
    model, tokenizer, directory = exported
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory)
    words = transformers.AutoTokenizer.from_pretrained(directory)
    for text in TEXTS:
        ours = log_likelihood(model, tokenizer, text)
        ids = words(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            mean = theirs(ids, labels=ids).loss.item()
            other = theirs(ids[:, 1:], labels=ids[:, 1:]).loss.item()
        assert error(-mean * (ids.size(1) - 1), ours, tokenizer, text) < BOUND
        assert error(-other * (ids.size(1) - 2), ours, tokenizer, text) > 100 * BOUND  # the control


TASKS = {  # name: output_type, context, text
    "document": ("loglikelihood_rolling", "", "{{text}}"),
    "target": ("loglikelihood", "", "{{text}}"),
    "continuation": ("loglikelihood", "{{text.split()[0]}}", "{{text[text.split()[0]|length:]}}")}


def write_tasks(directory):
    (directory / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    for name, (kind, context, text) in TASKS.items():
        task = {"task": name, "output_type": kind, "doc_to_text": context, "doc_to_target": text,
                "target_delimiter": "", "dataset_path": "json", "test_split": "test",
                "dataset_kwargs": {"data_files": {"test": str(directory / "texts.jsonl")},
                                   "cache_dir": str(directory / "cache")},
                "metric_list": [{"metric": "bits_per_byte" if "rolling" in kind else "perplexity"}]}
        (directory / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML


def worst_of(samples: list[dict], task: str, model, tokenizer) -> float:
    """The largest error a token."""
    errors = []
    for sample in samples:
        theirs, text = sample["filtered_resps"][0], sample["doc"]["text"]
        context = text.split()[0] if task == "continuation" else ""
        ours = log_likelihood(model, tokenizer, text[len(context):], context)
        theirs = float(theirs[0] if isinstance(theirs, (list, tuple)) else theirs)  # a text in its files
        errors.append(error(theirs, ours, tokenizer, text[len(context):]))
    assert len(errors) == len(TEXTS)
    return max(errors)


@each_family
def test_lm_eval_scores_as_we_do(exported, transformers, tmp_path):
    pytest.importorskip("lm_eval.models.huggingface", reason="pip install lm_eval accelerate peft")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    model, tokenizer, directory = exported
    write_tasks(tmp_path)

    def worst(task: str, **arguments) -> float:
        """Each task alone, as lm_eval shares what two tasks have in common."""
        found = simple_evaluate(
            "hf", model_args={"pretrained": str(directory), "device": "cpu", **arguments}, tasks=[task],
            task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False), batch_size=1,
            bootstrap_iters=0, log_samples=True)["samples"][task]
        return worst_of(found, task, model, tokenizer)

    assert worst("target") < BOUND
    assert worst("continuation") < BOUND
    # for rolling log-likelihoods lm_eval adds the first token itself, and so a second one unless told not to
    assert worst("document", add_bos_token=False) < BOUND
    assert worst("document") > 10 * BOUND
    path = directory / "tokenizer.json"  # the control: what was exported without the post-processor
    path.write_text(json.dumps(json.loads(path.read_text()) | {"post_processor": None}))
    assert worst("continuation") > 10 * BOUND


GUIDE = (ROOT / "docs" / "running.md").read_text().partition("**lm-evaluation-harness.**")[2]
COMMAND = re.search(r"^lm_eval (.*?)\n```", GUIDE, re.M | re.S)[1].replace("\\\n", "")
OF_DOCUMENTS = re.search(r"`(,add_bos_token=\w+)`", GUIDE)[1]
OF_PAIRS = re.search(r"`--(apply_\w+)`", GUIDE)[1]


def test_the_command_of_the_guide_names_an_export():
    """And what the tests of this file run: the model, a processor, one sample at a time."""
    words = shlex.split(COMMAND)
    assert words[::2] == ["--model", "--model_args", "--tasks", "--device", "--batch_size"]
    assert (words[1], *words[7::2]) == ("hf", "cpu", "1")
    assert re.fullmatch(r"pretrained=runs/[\w-]+/hf", words[3])


@pytest.mark.full
@each_family
def test_the_command_of_the_guide_scores_as_we_do(exported, tmp_path, monkeypatch):
    """With tasks of this file in place of those of the hub. For documents, what the guide says is added; the
    control is the command without it.
    """
    pytest.importorskip("lm_eval.models.huggingface", reason="pip install lm_eval accelerate peft")
    from lm_eval.__main__ import cli_evaluate
    model, tokenizer, directory = exported
    write_tasks(tmp_path)

    def worst(task: str, added: str = "") -> float:
        words = shlex.split(COMMAND)
        words[3] = f"pretrained={directory}{added}"
        words[5] = task
        results = tmp_path / f"results{added}-{task}"
        own = ["--include_path", str(tmp_path), "--output_path", str(results), "--log_samples"]
        monkeypatch.setattr("sys.argv", ["lm_eval", *words, *own])
        cli_evaluate()
        path, = results.rglob("samples_*.jsonl")
        return worst_of([*map(json.loads, path.read_text().splitlines())], task, model, tokenizer)

    assert worst("target") < BOUND
    assert worst("continuation") < BOUND
    assert worst("document", OF_DOCUMENTS) < BOUND
    assert worst("document") > 10 * BOUND


@torch.no_grad()
def log_likelihood_of_answer(model, tokenizer, question: str, answer: str) -> float:
    asked = prompt_ids(tokenizer, question).tolist()
    ids = torch.tensor([asked + tokenizer.encode(answer).tolist()])
    logits = model(ids[:, :-1])[0, :, :tokenizer.vocab_size]
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[len(asked) - 1:].sum().item()


@pytest.mark.full
@each_family
def test_answers_are_scored_as_we_do_with_the_word_of_the_guide(make, tmp_path):
    """The controls: without it, and an HRM with attention `prefix`, whose questions it reads otherwise."""
    pytest.importorskip("lm_eval.models.huggingface", reason="pip install lm_eval accelerate peft")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    tokenizer = with_markers(load_tokenizer("bytes"))
    pairs = {"7 and 1?": "it is 8", "what is 12 and 1?": "it is 13"}
    rows = [{"text": question, "answer": answer} for question, answer in pairs.items()]
    write_tasks(tmp_path)
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = json.loads((tmp_path / "target.yaml").read_text())
    task |= {"task": "pairs", "doc_to_text": "{{text}}", "doc_to_target": "{{answer}}"}
    (tmp_path / "pairs.yaml").write_text(json.dumps(task))

    def worst(attention: str, **options) -> float:
        torch.manual_seed(0)
        model = make(vocab_size=tokenizer.vocab_size, padded_vocab=320, seq_len=64, attention=attention,
                     **tokenizer.marker_ids).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        to_hf(model, tmp_path / attention, tokenizer)
        found = simple_evaluate(
            "hf", model_args={"pretrained": str(tmp_path / attention), "device": "cpu"}, tasks=["pairs"],
            task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False), batch_size=1,
            bootstrap_iters=0, log_samples=True, **options)["samples"]["pairs"]
        errors = []
        for sample in found:
            question, answer = sample["doc"]["text"], sample["doc"]["answer"]
            ours = log_likelihood_of_answer(model, tokenizer, question, answer)
            errors.append(error(sample["filtered_resps"][0][0], ours, tokenizer, answer))
        assert len(errors) == len(pairs)
        return max(errors)

    assert worst("isolated", **{OF_PAIRS: True}) < BOUND
    assert worst("isolated") > 10 * BOUND
    if make is hrm:
        assert worst("prefix", **{OF_PAIRS: True}) > 5 * BOUND
