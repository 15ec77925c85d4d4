"""Sampling: what is filtered, several texts at once, lines of a file, and the perplexity of evaluations."""

import io
import json
import math
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from runs import Trainer, evaluations_of
from test_pairs import prepare, samples, write

import monitor
from model import GPT2
from vocab.tokenizer import load_tokenizer
from weights import sampling
from weights.sampling import filtered, generate, sample_ids, samples_of
from weights.use import load_run

SETTINGS = [(1.0, 0, 0.9), (0.7, 20, 0.8), (1.3, 50, 0.999), (0.9, 0, 0.1), (1.0, 5, 1.0), (1.0, 0, 0.0)]
TRAINED = Trainer("train_gpt2.py", steps=2, save_every=2, eval_every=2, eval_batches=1, max_new_tokens=12)


@pytest.fixture(scope="module")
def run(shards, tmp_path_factory):
    out = tmp_path_factory.mktemp("sampling") / "run"
    done = TRAINED.train(0, shards, out)
    assert done.code == 0, done.out
    return out


def answer(out, *flags, typed: str = "") -> str:
    with mock.patch("sys.stdin", io.StringIO(typed)):
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

# ------------------------------------------------------------------------------------------------ the command

def test_chat_answers_each_line_of_a_file(run, tmp_path):
    """Stdout has the answers alone, in the order of the lines; an empty line is an empty prompt. Each line
    has a seed of its own, the first that of the command.
    """
    prompts = ["the", "", "a b"]
    texts = [answer(run, "--prompt", prompt, "--seed", seed) for seed, prompt in enumerate(prompts)]
    wanted = "".join(text.removeprefix(prompt) for text, prompt in zip(texts, prompts))
    for content in "the\n\na b\n", "the\n\na b":
        assert answer(run, "--chat", typed=content) == wanted
    assert answer(run, "--chat", typed="here\n\na b\n") != wanted
    assert answer(run, "--chat", typed="the\nthe\n") != 2 * answer(run, "--prompt", "the").removeprefix("the")
    assert answer(run, "--chat", typed="") == ""


def test_several_samples_are_the_answers_alone(run):
    few = ["--num-samples", "3", "--max-new-tokens", "3"]
    texts = answer(run, "--prompt", "the", *few)
    assert len({*texts.splitlines()}) >= 3
    assert not any(text.startswith("the") for text in texts.splitlines())
    assert answer(run, "--chat", *few, typed="the\n") == texts
    assert answer(run, "--prompt", "the", *few, "--seed", "1") != texts


def test_what_cannot_be_sampled_is_one_sentence(run):
    done = TRAINED.here("--out", run, "--prompt", "a", "--num-samples", "2", "--temperature", "0")
    assert done.code == 2 and "--num-samples with --temperature 0" in done.out
    for flags in (["--top-p", "1.5"], ["--top-p", "-1"], ["--num-samples", "0"], ["--num-samples", "2.5"]):
        done = TRAINED.here("--out", run, "--prompt", "a", *flags)
        assert done.code == 2 and f"argument {flags[0]}" in done.out, done.out


def test_a_prompt_that_is_too_long_does_not_end_the_chat(tmp_path, monkeypatch, capsys):
    pairs = prepare(write(tmp_path / "some.jsonl", samples(300)), tmp_path / "pairs", row=64)
    trainer = Trainer("train_gpt2.py", steps=1, eval_batches=1, max_new_tokens=3, seq_len=64)
    assert trainer.train(0, pairs, tmp_path / "run").code == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO("why\n" + "why " * 200 + "\nwhy\n"))
    done = trainer.here("--out", tmp_path / "run", "--chat", "--temperature", "0")
    assert done.code == 0 and len({*done.out.splitlines()}) == 1, done.out
    assert done.out.count("\n") == 2  # the prompts before and after it are answered
    assert "error: the prompt has 802 tokens" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------- perplexity

def test_evaluations_have_the_perplexity(run):
    logged = evaluations_of(run)[-1]
    assert logged["val_perplexity"] == math.exp(logged["val_loss"])
    done = answer(run, "--eval-only")
    assert json.loads(done.splitlines()[-1])["val_perplexity"] == logged["val_perplexity"]
    assert f" | perplexity {logged['val_perplexity']:.4g}" in done
    assert f" | perplexity {logged['val_perplexity']:.4g} | " in (run / "train.log").read_text()


def test_a_perplexity_that_is_no_number_or_ones_own_stays():
    sums = {"loss": 6.0, "nats": 6.0, "labels": 2, "samples": 1, "bytes": 4}
    assert monitor.means_of_sums(sums)["val_perplexity"] == math.exp(3)
    own = {"perplexity": 10.0, "perplexity (count)": 4}
    assert monitor.means_of_sums(sums | own)["val_perplexity"] == 2.5
    assert monitor.means_of_sums(sums | {"nats": 1e9})["val_perplexity"] == math.inf  # no float64 is so large
    assert math.isnan(monitor.means_of_sums(sums | {"nats": math.nan})["val_perplexity"])
    del sums["nats"]  # another loss than the cross-entropy of a text
    assert monitor.means_of_sums(sums).keys() == {"val_loss"}
