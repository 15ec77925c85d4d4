"""weights/sampling.py: what is filtered, several texts at once, the lines of --prompt and --chat, and models
that write otherwise than they learn.
"""

import io
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from pair_data import RESPONSE, START, T, gpt2
from runs import Trainer, edited
from train_recurrent import Recurrent

import model as models
from cli.errors import UserError
from model import GPT2, HRM, use_device
from vocab.tokenizer import load_tokenizer, with_markers
from weights import sampling, use
from weights.sampling import KVCache, contradiction, filtered, generate, sample_ids, samples_of

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


BYTES = with_markers(load_tokenizer("bytes"))


@pytest.mark.parametrize("response, prompt, most, end, written, named", [
    (RESPONSE, "why", None, 99, T - 5 + 1, "note"), (RESPONSE, "why", 7, 99, 7, "note"),
    (RESPONSE, "why", 7, 2, 2, ""), (-1, "why " * 30, 3, 99, 3, "121")])
def test_an_answer_goes_on_to_its_end_or_that_of_the_context(
        monkeypatch, capsys, response, prompt, most, end, written, named):
    """A model of plain text goes on after the context. What is cut is said. While training, all ranks write
    equally many tokens: unlike processors may end an answer elsewhere, and with zero3 a rank would be alone.
    """
    count, decode = [], GPT2.decode
    monkeypatch.setattr(GPT2, "decode", lambda *args: count.append(1) or decode(*args))
    monkeypatch.setattr(sampling, "sample_ids",
                        lambda *_: torch.tensor([65 if len(count) <= end else START]))
    flags = SimpleNamespace(max_new_tokens=most, temperature=0, top_k=0, seed=0, condition="")

    def answer(prompt, stop) -> str:
        count.clear()
        model = gpt2(response=response).eval()
        return "".join(sampling.samples_of(model, BYTES, "cpu", prompt, flags, stop)[0])

    assert answer(prompt, stop=True) == "A" * written
    said = capsys.readouterr().err
    assert named in said and bool(named) == bool(said)
    if end == 2:
        assert len(count) == 3 and answer(prompt, stop=False) == "AA" and len(count) == 7
        with pytest.raises(UserError, match=f" {T} .* {T}"):
            answer("x" * (T - 2), stop=True)


# -----------------------------------------------------------------------------------------------------------
# Models that write otherwise than they learn


CPU = torch.device("cpu")


IDS = {"vocab_size": 60, "padded_vocab": 64, "seq_len": 32}
PAIRS = {"start": 57, "response": 58}


def built(model_class, **config):
    torch.manual_seed(0)
    shape = {} if model_class is Recurrent else {"n_head": 2, "d_model": 16, "n_layer": 2}
    return model_class(model_class.Config(**IDS | shape | config))


def windowed(model_class):
    class Windowed(model_class):
        def mask(self, idx, cache, flex=True):
            return models.attention_mask(lambda b, h, i, j: (j <= i) & (i - j < 4), idx, False)

    return Windowed


def changed(change):
    """A model with other hidden states; `change` may also draw random numbers."""
    class Changed(GPT2):
        def hidden(self, idx, cache=None):
            x = super().hidden(idx, cache)
            return x + change(x)

    return Changed


class Uncached(GPT2):
    """Caps what it shows when asked for logits, but not what it writes."""

    def forward(self, idx, targets=None, per_token=False):
        found = super().forward(idx, targets, per_token)
        return 0.1 * torch.tanh(10 * found) if targets is None else found


class Counting(GPT2):
    """Its buffer changes in each pass."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("calls", torch.zeros(()))

    def hidden(self, idx, cache=None):
        self.calls = self.calls + 1
        return super().hidden(idx, cache)


class Mine(GPT2):
    """A loss of its own."""

    def loss(self, hidden, idx, targets):
        return super().loss(0.5 * hidden, idx, targets)


RIGHT = [
    (GPT2, {"modern": True}), (GPT2, {"seq_len": 1}),
    (GPT2, PAIRS | {"attention": "isolated", "modern": True}), (GPT2, PAIRS | {"attention": "prefix"}),
    (GPT2, {"attention": "isolated", "start": 57}),
    (HRM, PAIRS | {"h_cycles": "2:4"}), (HRM, {"halt": True, "dropout": 0.1, "inject_input": True}),
    (changed(lambda x: 0.1 * torch.randn_like(x)), {}), (Counting, {}), (Mine, {}),
    (Recurrent, {"width": 16})]
WRONG = [
    (windowed(GPT2), {"modern": True}), (windowed(GPT2), PAIRS), (windowed(HRM), {}),
    (windowed(HRM), {"halt": True}), (changed(lambda x: 0.5 * F.pad(x[:, 1:], (0, 0, 0, 1))), {}),
    (changed(lambda x: 0.5 * F.pad(x[:, :-1], (0, 0, 1, 0))), {}), (Uncached, {})]


def writes(model) -> str:
    torch.manual_seed(1)
    for p in model.parameters():  # as large as trained ones; --modern begins with zeros
        p.data.add_(0.2 * torch.randn(p.shape))
    return contradiction(model.train(), CPU)


@pytest.mark.parametrize("model_class, config", RIGHT + WRONG)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_writes_otherwise_than_it_learns_is_named(model_class, config, dtype):
    """The model stays as it was."""
    model = built(model_class, **config)
    use_device(model, CPU, dtype)
    if (model_class, config) in WRONG:
        assert "two passes" in writes(model)
        return
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    torch.manual_seed(1)
    random, attributes = torch.get_rng_state(), dict(vars(model))
    assert contradiction(model, CPU) == ""
    assert torch.equal(torch.get_rng_state(), random) and vars(model) == attributes and model.training
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert writes(model) == ""


def test_an_edit_of_the_library_is_found_where_the_loss_does_not_see_it(monkeypatch):
    plain = models.CausalLM.logits
    monkeypatch.setattr(models.CausalLM, "logits", lambda self, hidden: 0.5 * plain(self, hidden))
    assert "the loss differs" in writes(built(HRM)) and writes(built(Mine)) == ""


def test_a_model_that_cannot_be_asked_is_no_contradiction(capsys):
    """Its forward wants targets, which writing does not need."""
    class Wants(GPT2):
        def forward(self, idx, targets):
            return super().forward(idx, targets)

    model = built(Wants)
    assert contradiction(model, CPU) == "" and model.training and model.compute_dtype == torch.float32
    assert "WARNING: Wants " in capsys.readouterr().err


WINDOW = """
class Windowed(GPT2):
    def mask(self, idx, cache, flex=True):
        from model import attention_mask
        return attention_mask(lambda b, h, i, j: (j <= i) & (i - j < 4), idx, False)

GPT2 = Windowed
"""


def test_the_sample_is_refused_and_not_the_training(shards, tmp_path):
    """On two processes."""
    trainer = edited(tmp_path / "train_windowed.py", ("before", "BETAS = ", WINDOW), steps=8, eval_every=4,
                     sample_every=1, max_new_tokens=3, lr=1e-2)
    done = trainer.fork(2, shards, tmp_path / "run")
    assert done.code == 0 and done.out.count("(none: Windowed ") == 2, done.out
    for words, code in ((["--prompt", "def"], 2), (["--chat"], 2), (["--data", shards, "--eval-only"], 0)):
        used = trainer.here("--out", tmp_path / "run", *words)
        assert used.code == code and ("error: Windowed " in used.out) == (code == 2), used.out


def test_keys_and_values_may_have_unlike_widths():
    cache, keys, values = KVCache(3), torch.rand(2, 1, 3, 4), torch.rand(2, 1, 3, 6)
    for begin, end in (0, 2), (2, 3):
        cache.slot, cache.length = 0, begin
        found = cache.extend(keys[:, :, begin:end], values[:, :, begin:end])
    assert all(map(torch.equal, found, (keys, values)))
