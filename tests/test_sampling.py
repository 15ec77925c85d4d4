"""Sampling: what is filtered, several texts at once, the text at which an answer ends, files of prompts, and
the perplexity of evaluations.
"""

import contextlib
import json
import math
import os
import re
from types import SimpleNamespace

import pytest
import torch
from processes import fork
from runs import Trainer, evaluations_of
from test_pairs import prepare, samples, write

import monitor
from model import GPT2
from prepare.tokenizer import load_tokenizer
from weights import sampling
from weights.sampling import before, filtered, generate, sample_ids, samples_of
from weights.use import load_run

SETTINGS = [(1.0, 0, 0.9), (0.7, 20, 0.8), (1.3, 50, 0.999), (0.9, 0, 0.1), (1.0, 5, 1.0), (1.0, 0, 0.0)]
TRAINED = Trainer("train_gpt2.py", steps=2, save_every=2, eval_every=2, eval_batches=1, max_new_tokens=12)


@pytest.fixture(scope="module")
def run(shards, tmp_path_factory):
    out = tmp_path_factory.mktemp("sampling") / "run"
    done = TRAINED.train(0, shards, out)
    assert done.code == 0, done.out
    return out


def answer(out, *flags) -> str:
    done = TRAINED.here("--out", out, *flags)
    assert done.code == 0, done.out
    return done.out


# ------------------------------------------------------------------------------------------- what is filtered

@pytest.mark.parametrize("temperature, top_k, top_p", SETTINGS)
def test_filtered_probabilities_are_those_of_transformers(temperature, top_k, top_p):
    """Also where logits are equal, as those of bfloat16 often are."""
    logits = pytest.importorskip("transformers.generation.logits_process")
    generator = torch.Generator().manual_seed(0)
    for scores in (3 * torch.randn(8, 400, generator=generator),
                   torch.randn(8, 400, generator=generator).bfloat16().float()):
        theirs = logits.TemperatureLogitsWarper(temperature)(None, scores)
        if top_k:
            theirs = logits.TopKLogitsWarper(top_k)(None, theirs)
        if top_p < 1:
            theirs = logits.TopPLogitsWarper(max(top_p, 1e-9))(None, theirs)
        ours = filtered(scores, temperature, top_k, top_p)
        assert (ours.softmax(-1) - theirs.softmax(-1)).abs().max() < 1e-6
        assert torch.equal(ours.isinf(), theirs.isinf())
        if top_p in (0.8, 0.9):  # the bound tells the two filters apart, and that of another sum
            assert (filtered(scores, temperature, top_k, top_p + 0.05).softmax(-1) - theirs.softmax(-1)
                    ).abs().max() > 1e-6


def test_the_likeliest_ids_that_reach_the_sum_stay():
    logits = torch.tensor([[0.1, 0.5, 0.25, 0.15]]).log()
    for top_p, kept in ((0, [1]), (0.4, [1]), (0.6, [1, 2]), (0.76, [1, 2, 3]), (1, [0, 1, 2, 3])):
        assert (filtered(logits, 1.0, None, top_p) > -math.inf)[0].nonzero()[:, 0].tolist() == kept, top_p
    # after the likeliest ids have been taken, and of what is left
    assert (filtered(logits, 1.0, 2, 0.6) > -math.inf)[0].nonzero()[:, 0].tolist() == [1]


def test_texts_that_are_drawn_together_follow_the_probabilities():
    wanted = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05, 0.0])
    generator = torch.Generator().manual_seed(0)
    for top_k, top_p, expected in ((0, 1.0, wanted), (2, 1.0, torch.tensor([5, 0, 3, 0, 0, 0]) / 8),
                                   (0, 0.7, torch.tensor([5, 0, 3, 0, 0, 0]) / 8)):
        ids = sample_ids(wanted.log().expand(50_000, -1), 1.0, top_k, generator, top_p, num_samples=50_000)
        found = ids.bincount(minlength=6) / 50_000
        assert (found - expected).abs().max() < 0.01
        assert ((found > 0) == (expected > 0)).all()  # the first and the last that cannot be, too


def test_no_running_sum_is_one_of_floats(monkeypatch):
    """Which torch refuses on a GPU where it has to be deterministic."""
    cumsum = torch.Tensor.cumsum

    def checked(tensor, dim):
        assert not tensor.is_floating_point()
        return cumsum(tensor, dim)

    monkeypatch.setattr(torch.Tensor, "cumsum", checked)
    sample_ids(torch.randn(3, 50), 1.0, 20, torch.Generator(), 0.9, num_samples=3)
    with pytest.raises(AssertionError):
        torch.rand(3).cumsum(0)


# ------------------------------------------------------------------------------------- several texts at once

def model() -> GPT2:
    torch.manual_seed(0)
    config = GPT2.Config(n_layer=2, n_head=2, d_model=32, seq_len=32, vocab_size=257, padded_vocab=320,
                         start=256)
    built = GPT2(config).eval()
    with torch.no_grad():
        built.embed.weight.mul_(8)  # so that it is not alike to all
    return built


def test_each_of_several_texts_has_the_logits_of_its_own(monkeypatch):
    """Through a full context; each row is as if it had been alone, and they are not the same."""
    prompts, seen, drawn = torch.tensor([[256, 65, 66], [256, 70, 71]]), [], sampling.sample_ids
    monkeypatch.setattr(sampling, "sample_ids",
                        lambda logits, *rest: seen.append(logits.clone()) or drawn(logits, *rest))
    ids = torch.stack([*generate(model(), prompts, 40, 0.9, 20, top_p=0.9, num_samples=3)], dim=1)
    assert ids.shape == (6, 40) and len({*map(str, ids.tolist())}) == 6
    together = torch.stack(seen, dim=1)
    for row in range(6):
        alone, given = [], iter(ids[row])

        def write_the_same(logits, *rest, alone=alone, given=given):
            alone.append(logits)
            return next(given)[None]

        monkeypatch.setattr(sampling, "sample_ids", write_the_same)
        assert len([*generate(model(), prompts[row // 3:][:1], 40)]) == 40
        assert (torch.cat(alone) - together[row]).abs().max() < 1e-4
        if row:
            assert (torch.cat(alone) - together[0]).abs().max() > 1e-2  # the bound tells rows apart


def test_a_single_text_keeps_its_bits():
    """It is drawn as it was when nothing else could be: by multinomial, of the whole vocabulary."""
    gpt2, prompt = model(), torch.tensor([[256, 65, 66]])
    generator, ids = torch.Generator().manual_seed(7), prompt
    with torch.no_grad():
        for _ in range(20):
            logits = gpt2(ids)[:, -1].float() / 0.8
            logits = logits.masked_fill(logits < logits.topk(50).values[:, -1:], -torch.inf)
            ids = torch.cat((ids, torch.multinomial(logits.softmax(-1), 1, generator=generator)), dim=1)
    assert torch.equal(torch.stack([*generate(gpt2, prompt, 20, 0.8, 50, seed=7)], 1), ids[:, 3:])
    two = torch.stack([*generate(gpt2, prompt, 20, 0.8, 50, seed=7, num_samples=2)], 1)
    assert not torch.equal(two[:1], ids[:, 3:])


def test_greedy_texts_are_those_of_transformers(run, tmp_path):
    """Token for token, whatever else is said of sampling."""
    transformers = pytest.importorskip("transformers", minversion="4.48")
    assert TRAINED.here("--out", run, "--export", "hf").code == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(run / "hf")
    gpt2, tokenizer = load_run(GPT2, run, precision="fp32")
    prompt = torch.tensor([[tokenizer.eot, *tokenizer.encode("the").tolist()]])
    wanted = theirs.generate(prompt, max_new_tokens=20, do_sample=False, num_return_sequences=1,
                             eos_token_id=None, pad_token_id=0)[:, prompt.size(1):]
    ours = torch.stack([*generate(gpt2, prompt, 20, temperature=0, top_k=3, top_p=0.5, num_samples=3)], 1)
    assert torch.equal(ours, wanted.repeat(3, 1))


def test_the_model_writes_as_far_as_the_longest_text_is_read(monkeypatch):
    """Rows end at their own end, and the model stops after the last of them."""
    ends, steps = {0: 3, 1: 6}, []
    monkeypatch.setattr(sampling, "sample_ids", lambda logits, *_: steps.append(1) or torch.tensor(
        [256 if len(steps) == ends[row] else 65 + row for row in range(2)]))
    flags = SimpleNamespace(max_new_tokens=25, temperature=1.0, top_k=0, seed=0, condition="")
    tokenizer = load_tokenizer("bytes")
    texts = samples_of(model(), tokenizer, "cpu", "a", flags, stop=True, num_samples=2)
    assert ["".join(text) for text in texts] == ["AA", "BBBBB"] and len(steps) == 6


# ------------------------------------------------------------------------------------------ where a text ends

@pytest.mark.parametrize("stop, text", [
    ("\n", "one"), ("\n\n", "one\ntwo"), ("two", "one\n"), ("one", ""), ("ee", "one\ntwo\n\nthr"),
    ("é", "one\ntwo\n\nthree "), ("nowhere", "one\ntwo\n\nthree é."), ("wo\n\nthr", "one\nt")])
def test_a_text_ends_before_its_stop_wherever_it_is_cut(stop, text):
    whole = "one\ntwo\n\nthree é."
    for size in (1, 2, 3, 50):
        pieces = [whole[i:i + size] for i in range(0, len(whole), size)]
        assert "".join(before(stop, pieces)) == text
        assert stop not in text  # else the lines above would show nothing


def test_what_cannot_be_a_stop_is_written_at_once_and_nothing_is_read_after_it():
    read = []
    stream = before("!", (read.append(piece) or piece for piece in ["a", "b", "c!d", "e"]))
    assert next(stream) == "a" and read == ["a"]
    assert "".join(stream) == "bc" and read == ["a", "b", "c!d"]


def test_a_stop_ends_what_is_written_and_is_of_one_command(run, shards):
    """One that a run was trained with ends its own samples, and none that are asked for later."""
    free = answer(run, "--prompt", "the")
    stop = free[5:7]
    assert answer(run, "--prompt", "the", "--stop", stop) == free[:free.index(stop, 3)] + "\n"
    assert TRAINED.train(0, shards, run, steps=3, stop=stop).code == 0
    again = answer(run, "--prompt", "the")
    assert stop in again or len(again) > len(free) - 4
    few = answer(run, "--prompt", "the", "--resume", next(run.glob("checkpoints/step_00000002*")))
    assert few == free


# ------------------------------------------------------------------------------------------------ the command

@contextlib.contextmanager
def standard_input(file):
    before = os.dup(0)
    os.dup2(file.fileno(), 0)
    try:
        yield
    finally:
        os.dup2(before, 0)
        os.close(before)


def test_the_answers_of_a_file_are_those_of_its_lines(run, tmp_path):
    """Stdout has the answers alone, in the order of the lines; an empty line is an empty prompt. Each line
    has a seed of its own, the first that of the command. Standard input is read as a file is.
    """
    prompts = ["the", "", "a b"]
    texts = [answer(run, "--stop", "\n", "--prompt", prompt, "--seed", seed)
             for seed, prompt in enumerate(prompts)]
    wanted = "".join(text.removeprefix(prompt) for text, prompt in zip(texts, prompts))
    for name, content in (
            ("unix", b"the\n\na b\n"), ("no end", b"the\n\na b"), ("dos", b"the\r\n\r\na b\r\n"),
            ("mark", b"\xef\xbb\xbfthe\n\na b\n")):
        (tmp_path / name).write_bytes(content)
        assert answer(run, "--stop", "\n", "--prompt-file", tmp_path / name) == wanted, name
        with open(tmp_path / name, "rb") as file, standard_input(file):
            assert answer(run, "--stop", "\n", "--prompt-file", "-") == wanted, name
            assert os.path.samestat(os.fstat(0), os.fstat(file.fileno())), "it stays open"
    (tmp_path / "other").write_text("here\n\na b\n")
    assert answer(run, "--stop", "\n", "--prompt-file", tmp_path / "other") != wanted
    (tmp_path / "same").write_text("the\nthe\n")
    assert len({*answer(run, "--prompt-file", tmp_path / "same").splitlines()}) > 1
    (tmp_path / "none").write_text("")
    assert answer(run, "--prompt-file", tmp_path / "none") == ""


def test_two_processes_answer_each_line_once(run, tmp_path):
    (tmp_path / "prompts").write_text("the\na\n")
    flags = ["--out", str(run), "--prompt-file", str(tmp_path / "prompts"), "--stop", "\n"]
    done = fork(2, "train_gpt2.py", *flags)
    wanted = answer(run, *flags[2:])
    assert done.code == 0 and done.out.endswith(wanted) and wanted.count("\n") == 2, done.out
    assert done.out.count(wanted) == 1


def test_several_samples_are_the_answers_alone(run, tmp_path):
    (tmp_path / "prompts").write_text("the\na\n")
    few = ["--num-samples", "3", "--stop", "\n"]
    texts = answer(run, "--prompt", "the", *few)
    assert texts.count("\n") == 3 and len({*texts.splitlines()}) == 3
    assert not any(text.startswith("the") for text in texts.splitlines())
    both = answer(run, "--prompt-file", tmp_path / "prompts", *few)
    assert both.startswith(texts) and both.count("\n") == 6
    assert answer(run, "--prompt", "the", *few, "--seed", "1") != texts


def test_what_cannot_be_prompts_is_one_sentence(run, tmp_path, monkeypatch):
    (tmp_path / "latin").write_bytes(b"the\ncaf\xe9\n")
    for where, words in (
            (tmp_path / "nowhere", "FileNotFoundError: [Errno 2] No such file or directory"),
            (tmp_path / "latin" / "x", "NotADirectoryError"), ("", "FileNotFoundError"),
            (tmp_path, "IsADirectoryError"),
            (tmp_path / "latin", "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xe9"),
            ("-", "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xe9")):
        with open(tmp_path / "latin", "rb") as file, standard_input(file):
            done = TRAINED.here("--out", run, "--prompt-file", where)
        assert done.code == 2 and f"error: {where} cannot be read ({words}" in done.out, done.out
        assert "name a UTF-8 text with a prompt in each line, or - for standard" in done.out, done.out
    done = TRAINED.here("--out", run, "--prompt", "a", "--num-samples", "2", "--temperature", "0")
    assert done.code == 2 and "--num-samples writes one text again and again with --temperature 0" in done.out
    for flags in (["--top-p", "1.5"], ["--top-p", "-1"], ["--num-samples", "0"], ["--num-samples", "2.5"]):
        done = TRAINED.here("--out", run, "--prompt", "a", *flags)
        assert done.code == 2 and f"argument {flags[0]}" in done.out, done.out


def test_a_prompt_that_is_too_long_is_named_by_its_line(tmp_path):
    pairs = prepare(write(tmp_path / "some.jsonl", samples(300)), tmp_path / "pairs", row=64)
    trainer = Trainer("train_gpt2.py", steps=1, eval_batches=1, max_new_tokens=3, seq_len=64)
    assert trainer.train(0, pairs, tmp_path / "run").code == 0
    (tmp_path / "prompts").write_text("why\n" + "why " * 200 + "\n")
    done = trainer.here("--out", tmp_path / "run", "--prompt-file", tmp_path / "prompts")
    assert done.code == 2, done.out
    assert re.search(r"prompts, line 2: the prompt has \d+ tokens, but the context .*: shorten it", done.out)
    assert done.out.index("error: ") > 0  # after the first answer


# ------------------------------------------------------------------------------------------------- perplexity

def test_evaluations_have_the_perplexity(run):
    logged = evaluations_of(run)[-1]
    assert logged["val_perplexity"] == math.exp(logged["val_loss"])
    done = answer(run, "--eval-only")
    assert json.loads(done.splitlines()[-1])["val_perplexity"] == logged["val_perplexity"]
    assert f" | perplexity {logged['val_perplexity']:.4g}" in done
    assert f" | perplexity {logged['val_perplexity']:.4g} | " in (run / "train.log").read_text()


def test_a_perplexity_that_is_no_number_or_ones_own_stays():
    sums = {"loss": 6.0, "labels": 2, "samples": 1, "bytes": 4}
    assert monitor.results_of(sums)["val_perplexity"] == math.exp(3)
    own = {"perplexity": 10.0, "perplexity (count)": 4}
    assert monitor.results_of(sums | own)["val_perplexity"] == 2.5
    assert "val_perplexity" not in monitor.results_of(sums | {"loss": 1e9})  # no float64 is so large
    assert math.isnan(monitor.results_of(sums | {"loss": math.nan})["val_perplexity"])
