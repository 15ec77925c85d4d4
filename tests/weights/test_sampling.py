"""weights/sampling.py: what is filtered, several texts at once, and the lines of --prompt and --chat."""

import io
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from runs import Trainer

from cli.errors import UserError
from model import GPT2
from vocab.tokenizer import load_tokenizer
from weights import sampling, use
from weights.sampling import filtered, generate, sample_ids, samples_of

TRAINED = Trainer("train_gpt2.py", steps=2, max_new_tokens=12)


@pytest.mark.parametrize("temperature, top_k, top_p", [(0.7, 20, 0.8), (1.3, 500, 0.999), (1.0, 400, 0.0)])
def test_filtered_probabilities_are_those_of_transformers(temperature, top_k, top_p):
    """Also where logits are equal, as those of bfloat16 often are."""
    logits = pytest.importorskip("transformers.generation.logits_process")
    random = torch.randn(2, 8, 400, generator=torch.Generator().manual_seed(0))
    for scores in 3 * random[0], random[1].bfloat16().float():
        theirs = logits.TemperatureLogitsWarper(temperature)(None, scores)
        theirs = logits.TopKLogitsWarper(top_k)(None, theirs)
        theirs = logits.TopPLogitsWarper(max(top_p, 1e-9))(None, theirs)
        ours = filtered(scores, temperature, top_k, top_p)
        assert (ours.softmax(-1) - theirs.softmax(-1)).abs().max() < 1e-6
        assert torch.equal(ours.isinf(), theirs.isinf())


@pytest.mark.parametrize("num_samples", [1, 2])
def test_what_is_drawn_follows_the_probabilities(num_samples, monkeypatch):
    """And no running sum is one of floats, which torch refuses on a GPU where it has to be deterministic."""
    cumsum = torch.Tensor.cumsum

    def checked(tensor, dim):
        assert not tensor.is_floating_point()
        return cumsum(tensor, dim)

    monkeypatch.setattr(torch.Tensor, "cumsum", checked)
    wanted, generator = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05, 0.0]), torch.Generator().manual_seed(0)
    squares = wanted.square() / wanted.square().sum()
    for temperature, top_k, top_p, expected in (
            (1.0, 0, 1.0, wanted), (1.0, 0, 0.7, torch.tensor([5, 0, 3, 0, 0, 0]) / 8),
            (0.5, 0, 1.0, squares), (0, 0, 1.0, torch.eye(6)[0])):
        ids = sample_ids(wanted.log().expand(50_000, -1), temperature, top_k, generator, top_p, num_samples)
        found = ids.bincount(minlength=6) / 50_000
        assert (found - expected).abs().max() < 0.01
        assert ((found > 0) == (expected > 0)).all()  # the first and the last that cannot be, too


def model() -> GPT2:
    torch.manual_seed(0)
    built = GPT2(GPT2.Config(n_layer=2, n_head=2, d_model=32, seq_len=32, vocab_size=257, padded_vocab=320,
                             start=256)).eval()
    built.embed.weight.data *= 8  # so that it is not alike to all
    return built


def test_each_of_several_texts_has_the_logits_of_its_own(monkeypatch):
    """Through a full context; each row is as if it had been alone, and they are not the same."""
    prompts, seen = torch.tensor([[256, 65, 66], [256, 70, 71]]), []
    ids = torch.randint(256, (6, 40), generator=torch.Generator().manual_seed(0))

    def logits_of(prompt, rows, **named) -> torch.Tensor:
        seen.clear()
        given = iter(rows.T)
        monkeypatch.setattr(sampling, "sample_ids", lambda logits, *_: seen.append(logits) or next(given))
        assert torch.equal(torch.stack([*generate(model(), prompt, 40, **named)], dim=1), rows)
        return torch.stack(seen, dim=1)

    together = logits_of(prompts, ids, num_samples=3)
    for row in 0, 5:
        alone = logits_of(prompts[row // 3:][:1], ids[row:row + 1])
        assert (alone - together[row]).abs().max() < 1e-4
        assert (alone - together[row - 1]).abs().max() > 1e-2  # the bound tells rows apart


@torch.no_grad()
def test_a_single_text_keeps_its_bits():
    """It is drawn as it was when nothing else could be: by multinomial, of the whole vocabulary."""
    gpt2, prompt, generator = model(), torch.tensor([[256, 65, 66]]), torch.Generator().manual_seed(7)
    ids = prompt
    for _ in range(20):
        logits = gpt2(ids)[:, -1].float() / 0.8
        logits = logits.masked_fill(logits < logits.topk(50).values[:, -1:], -torch.inf)
        ids = torch.cat((ids, torch.multinomial(logits.softmax(-1), 1, generator=generator)), dim=1)
    assert torch.equal(torch.stack([*generate(gpt2, prompt, 20, 0.8, 50, seed=7)], 1), ids[:, 3:])


def test_the_model_writes_as_far_as_the_longest_text_is_read(monkeypatch):
    """Rows end at their own end, and the model stops after the last of them."""
    ends, steps = {0: 3, 1: 6}, []
    monkeypatch.setattr(sampling, "sample_ids", lambda logits, *_: steps.append(1) or torch.tensor(
        [256 if len(steps) == ends[row] else 65 + row for row in range(2)]))
    flags = SimpleNamespace(max_new_tokens=25, temperature=1.0, top_k=0, seed=0, condition="")
    texts = samples_of(model(), load_tokenizer("bytes"), "cpu", "a", flags, stop=True, num_samples=2)
    assert ["".join(text) for text in texts] == ["AA", "BBBBB"] and len(steps) == 6


# ------------------------------------------------------------------------------------------------ the command


@pytest.fixture(scope="module")
def run(shards, tmp_path_factory):
    out = tmp_path_factory.mktemp("sampling") / "run"
    assert TRAINED.train(0, shards, out).code == 0
    return out


def answer(out, *flags, typed: str = "") -> str:
    with mock.patch("sys.stdin", io.StringIO(typed)):
        return TRAINED.here("--out", out, *flags).out


def test_chat_answers_each_line_of_a_file(run):
    """Stdout has the answers alone, in the order of the lines; an empty line is an empty prompt. Each line
    has a seed of its own, the first that of the command. So are several samples the answers alone.
    """
    wanted = "".join(answer(run, "--prompt", prompt, "--seed", seed).removeprefix(prompt)
                     for seed, prompt in enumerate(("the", "", "a b")))
    assert answer(run, "--chat", typed="the\n\na b") == answer(run, "--chat", typed="the\n\na b\n") == wanted
    few = ["--num-samples", "3", "--max-new-tokens", "3"]
    found = answer(run, "--prompt", "the", *few)
    assert len({*found.splitlines()}) >= 3 and "the" not in [line[:3] for line in found.splitlines()]
    assert answer(run, "--chat", *few, typed="the\n") == found


@pytest.mark.parametrize("flags, named", [
    ("--num-samples 2 --temperature 0", "--temperature"), ("--top-p 1.5", "--top-p"),
    ("--num-samples 0", "--num-samples")])
def test_what_cannot_be_sampled_is_one_sentence(run, flags, named):
    done = TRAINED.here("--out", run, "--prompt", "a", *flags.split())
    assert done.code == 2 and named in done.out


def test_a_prompt_that_is_too_long_does_not_end_the_chat(run, monkeypatch, capsys):
    monkeypatch.setattr(use, "samples_of", mock.Mock(
        side_effect=[[["b"]], UserError("802 tokens"), [["d"]]]))
    assert answer(run, "--chat", typed="1\n2\n3\n") == "b\nd\n"
    assert "802 tokens" in capsys.readouterr().err
