"""The model card of an export: README.md in hf/, with the metadata that the Hugging Face hub reads."""

import re
import shlex
from contextlib import suppress
from pathlib import Path

import monitor
from cli.errors import UserError, say
from data import digest_json, directory_of, read_manifest, sources_of, write_atomically

# a template of huggingface_hub, in Jinja
CARD = """---
{{ card_data }}
---
{% if prefix and family == "GPT2" -%}
Transformers has no prefix mask for GPT-2: there a question sees only what comes before, in training all of
itself.

{% elif prefix -%}
**Pass question and answer as two texts**, `tokenizer(question, answer)`. In one text an answer sees itself:
a model that was tuned on such texts, in a test, had a loss of 0.036 there, and of 8.1 where it wrote answers.

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
- **License**: to be filled in, here and as `license:` in the first lines, one of
  https://huggingface.co/docs/hub/repositories-licenses

To use it with transformers in this directory, or elsewhere with the name of its repository for the dot:

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

It was trained by

```bash
{{ commands | join("\n") }}
```
{%- endif %}
"""


def public(word: str) -> str:
    """A word of a command without the folders of absolute paths, or of those that lead upwards."""
    return re.sub(r"(^|[=:,])[/~.][^,]*/(?=.)", r"\1", word)


def public_command(command: str) -> str:
    words = [public(word) for word in shlex.split(command) if not word.startswith("--master_")]
    return shlex.join(words)


def card_of(saved: dict) -> str:
    """The card of a checkpoint. What the files of its run and of its data no longer say is left out."""
    from huggingface_hub import ModelCard, ModelCardData  # comes with datasets
    settings, config = saved["settings"], saved["model_config"]
    run = Path(saved["path"]).parent.parent
    names = [settings["data"]]
    repositories = []
    with suppress(UserError):  # one is damaged
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
    """With its digest, by which the next export knows that nobody has edited it."""
    return f"{card}\n\n<!-- {digest_json(card)}: while this fits, an export replaces the file -->\n"


def write_card(path: Path, saved: dict):
    """Writes the card of a checkpoint in place of an earlier one, unless that was edited."""
    if path.is_file():
        earlier = path.read_text("utf-8", "replace")
        if earlier != signed(earlier.rpartition("\n\n<!-- ")[0]):
            return say(f"{path} stays as it is, because no export has written it so: move it away and export "
                       "again for a card of this model")
    write_atomically(path, signed(card_of(saved)).encode())
