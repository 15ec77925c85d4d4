"""What other programs do with an export of pairs: their chats have the ids of rows, and what they train has
the loss that it has here.
"""

import jinja2
import pytest
import torch
from pair_data import MESSAGES, documents, prepare, write
from tiny_models import export, gpt2, hrm

from vocab.tokenizer import load_tokenizer, with_markers
from vocab.vocabulary import EOT, RESPONSE
from weights.llama_cpp import to_gguf

transformers = pytest.importorskip("transformers", minversion="5.23")
BYTES = with_markers(load_tokenizer("bytes"))


def exported(build, directory, **config):
    model = build(vocab_size=BYTES.vocab_size, padded_vocab=320, seq_len=64, **BYTES.marker_ids, **config)
    export(model, BYTES, directory)
    return model


def talk_of(*texts: str) -> list[dict]:
    """Messages of who is named by the first letters."""
    roles = {role[0]: role for role in ("system", "user", "assistant", "tool")}
    return [{"role": roles[text[0]], "content": text[1:]} for text in texts]


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """The tokenizer of an export, and the template of its GGUF, which plain Jinja renders."""
    gguf = pytest.importorskip("gguf")
    path = tmp_path_factory.mktemp("export")
    to_gguf(exported(gpt2, path), path / "m.gguf", BYTES)
    text = gguf.GGUFReader(path / "m.gguf").fields["tokenizer.chat_template"].contents()
    return transformers.AutoTokenizer.from_pretrained(path), jinja2.Environment().from_string(text)


@pytest.mark.parametrize("talk", [
    talk_of("sBe short. ", "u1?", "a2", "u3?", "a4"), talk_of("ahello", "u1?", "a2"),
    talk_of("sA", "sB", "u1?", "u2?", "a3", "a4", "sC", "a5"), talk_of("u1?", "a", "t42", "a2"),
    talk_of("u{{ 1 }}\n", "a <s>\n", "u\n", "a ")])
def test_a_chat_of_any_turns_has_the_ids_of_a_row(talk, template, tmp_path):
    """With and without its answer, and only the answer is learned."""
    words, plain = template
    source = write(tmp_path / "x.jsonl", [{"messages": talk}])
    out = prepare(source, tmp_path / "out", row=64, val_split="hash:0.000001", **MESSAGES)
    answers = [at for at, m in enumerate(talk) if m["role"] == "assistant" and m["content"] and at]
    wholes = []
    for at in answers:
        asked, whole = talk[:at], talk[:at + 1]
        found = words.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        marked = words.apply_chat_template(whole, return_dict=True, return_assistant_tokens_mask=True)
        answer = [*talk[at]["content"].encode(), BYTES.eot]
        assert marked["input_ids"] == [*found, *answer]
        assert marked["assistant_masks"] == [0] * len(found) + [1] * len(answer)
        wholes.append(marked["input_ids"][:-1])
        for ids, turns, generate in (found, asked, True), (marked["input_ids"], whole, False):
            assert words.decode(ids) == plain.render(messages=turns, add_generation_prompt=generate,
                                                     bos_token=EOT, eos_token=EOT)
    assert answers and documents(out) == sorted(wholes)


def test_the_parts_of_a_message_are_text(template):
    words, _ = template
    assert words.pad_token == "[MASK]" and words.pad_token_id == BYTES.mask != words.eos_token_id
    parts = [{"type": "text", "text": "1 and "}, {"type": "text", "text": "1?"}]
    turns = [{"role": "user", "content": parts}, *talk_of("a2")]
    assert words.apply_chat_template(turns, tokenize=False) == f"{EOT}1 and 1?{RESPONSE}2{EOT}"


@torch.no_grad()
def test_an_answer_that_is_trained_has_the_loss_that_it_has_here(tmp_path):
    """As the guide gives samples to transformers' Trainer. The control: an answer that sees itself."""
    ours = exported(hrm, tmp_path, h_cycles=1, l_cycles=1, attention="prefix")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    words = transformers.AutoTokenizer.from_pretrained(tmp_path)
    row, labels = words("why", "so", return_tensors="pt"), torch.tensor([[-100] * 5 + [*b"so", BYTES.eot]])
    objective, _ = ours(row["input_ids"], labels.clamp(min=-1).roll(-1, 1))
    for types, same in (row["token_type_ids"], True), (torch.ones_like(labels), False):
        loss = theirs(row["input_ids"], token_type_ids=types, labels=labels).loss
        assert (abs(loss - objective / 3) <= 1e-5) == same
