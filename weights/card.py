"""Writes the model card of an export: README.md in hf/, with the metadata that the Hugging Face hub reads."""

import re
import shlex
from contextlib import suppress
from pathlib import Path

import monitor
from cli.errors import UserError, say
from cli.files import digest_json, write_atomically
from data import directory_of, read_manifest, sources_of

# A template of huggingface_hub, in Jinja.
CARD = """---
{{ card_data }}
---
{% if prefix and family == "GPT2" -%}
Transformers has no prefix mask for GPT-2. There, a token of a question sees only the tokens before it; in
training it saw the whole question.

{% elif prefix -%}
**Pass question and answer as two texts**, `tokenizer(question, answer)`. If both are in one text, the answer
sees itself. A model that was fine-tuned that way, as a test, reached a loss of 0.036, but 8.1 when it had to
write the answers.

{% endif -%}
# {{ family }} of size {{ settings.size }}{{ ", {:,} parameters".format(parameters) if parameters }}

- **Data**: `{{ names | join("`, from `") }}`; tokenizer `{{ words }}`
- **Training**: {{ "{:,} tokens in {:,} steps, to a loss of {:.4f}".format(samples * seq_len, step, loss) }}
{%- for evaluation in (records | selectattr("val_loss", "number") | list)[-1:] %}
- **Evaluation**, after step {{ evaluation.step }}:
  {{ results(dict(evaluation.items() | rejectattr(1, "none"))) | join(", ") }}
{%- endfor %}
- **Recipe**:
{%- for name in "size n_layer n_head d_model ff h_cycles l_cycles window modern attention seq_len steps
                 global_batch optimizer lr BETAS weight_decay grad_clip schedule warmup min_lr decay ema
                 dropout precision mask_rate bp_steps loss seed".split()
                if settings[name] is defined and settings[name] is not none %}
{{- "," if not loop.first }} {{ name }} {{ settings[name] }}
{%- endfor %}
- **License**: to be filled in, here and as `license:` in the first lines, with one of
  https://huggingface.co/docs/hub/repositories-licenses

To use it with transformers, run this here, or elsewhere with the name of its repository instead of ".":

```python
{% if masked -%}
from transformers import pipeline
fill = pipeline("fill-mask", ".")
print(fill(f"The {fill.tokenizer.mask_token} sat."))
{%- else -%}
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(".")
tokenizer = AutoTokenizer.from_pretrained(".")
text = "{{ "Who are you?" if (model_config.response or -1) >= 0 else "The" }}"
prompt = tokenizer(text, return_tensors="pt")
ids = model.generate(**prompt, max_new_tokens=20)[0, prompt["input_ids"].size(1):]
print(tokenizer.decode(ids, skip_special_tokens=True))
{%- endif %}
```
{%- if commands %}

It was trained with

```bash
{{ commands | join("\n") }}
```
{%- endif %}
"""


def public(word: str) -> str:
    """A word of a command, in which absolute paths and paths that lead upwards lose their folders."""
    return re.sub(r"(^|[=:,])[/~.][^,]*/(?=.)", r"\1", word)


def public_command(command: str) -> str:
    """A command without folders and addresses, which readers of a card need not know."""
    words = [public(word) for word in shlex.split(command) if not word.startswith("--master_")]
    return shlex.join(words)


def card_of(saved: dict) -> str:
    """The text of the card for a checkpoint. Leaves out what the run's and the data's files no longer say."""
    from huggingface_hub import ModelCard, ModelCardData  # comes with datasets
    settings, config = saved["settings"], saved["model_config"]
    run = Path(saved["path"]).parent.parent
    names = [settings["data"]]
    repositories = []
    with suppress(UserError):  # a damaged manifest
        for source in sources_of(settings["data"]):
            if manifest := read_manifest(directory_of(source, settings["tokenizer"])):
                names.append(manifest["dataset"])
                repositories.append(manifest["settings"]["source"].partition(":")[0])
    of_hub = [name for name in dict.fromkeys(repositories) if "/" in name]
    masked = "global_every" in config
    data = ModelCardData(library_name="transformers", tags=[saved["family"].lower()], datasets=of_hub or None,
                         pipeline_tag="fill-mask" if masked else "text-generation")
    begun = monitor.read_config(run)
    commands = [public_command(command) for command in begun.get("commands") or []]
    card = ModelCard.from_template(
        data, template_str=CARD, **saved, prefix=config.get("attention") == "prefix", masked=masked,
        names=[*dict.fromkeys(map(public, names))], words=public(saved["tokenizer"]),
        records=monitor.records_until(run, saved["step"], say), results=monitor.results,
        parameters=begun.get("parameters"), commands=[*dict.fromkeys(commands)])
    return card.content


def signed(card: str) -> str:
    """The card with its digest, which shows the next export that nobody has edited the card."""
    return f"{card}\n\n<!-- {digest_json(card)}: while this fits, an export replaces the file -->\n"


def write_card(path: Path, saved: dict):
    """Writes the card of a checkpoint. Keeps an earlier card if somebody has edited it, and says so."""
    if path.is_file():
        earlier = path.read_text("utf-8", "replace")
        if earlier != signed(earlier.rpartition("\n\n<!-- ")[0]):
            return say(f"{path} was edited, so it is kept: to get a card for this model, move it away and "
                       "export again")
    write_atomically(path, signed(card_of(saved)).encode())
