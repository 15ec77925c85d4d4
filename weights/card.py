"""The model card of an export: README.md in hf/, with the metadata that the Hugging Face hub reads."""

import re
import shlex
from contextlib import suppress
from pathlib import Path

import monitor
from data import UserError, digest_json, directory_of, read_manifest, say, sources_of, write_atomically

CARD = """---
{%- set masked = "global_every" in model_config %}
library_name: transformers
pipeline_tag: {{ "fill-mask" if masked else "text-generation" }}
tags:
- {{ family | lower }}
{%- set manifests = manifests | select | list %}
{%- for source in manifests | map(attribute="settings.source") | unique if "/" in source %}
{{- "\ndatasets:" if loop.first }}
- {{ source.partition(":")[0] }}
{%- endfor %}
{%- set known = {"en": ("c4", "fineweb-edu", "imdb", "wikipedia-en"), "es": ("c4-es", "wikipedia-es")} %}
{%- for language in known if manifests | selectattr("dataset", "in", known[language]) | list %}
{{- "\nlanguage:" if loop.first }}
- {{ language }}
{%- endfor %}
# license: to be filled in, as one of https://huggingface.co/docs/hub/repositories-licenses
---
{% if model_config.attention == "prefix" and family == "GPT2" -%}
Transformers has no prefix mask for GPT-2: there a question sees only what comes before, in training all of
itself.

{% elif model_config.attention == "prefix" -%}
**Pass question and answer as two texts**, `tokenizer(question, answer)`. In one text an answer sees itself:
a model that was tuned on such texts had a loss of 0.036 there, and of 8.1 where it wrote the answers.

{% endif -%}
# {{ family }} of size {{ settings.size }}

- **Data**: `{{ public(settings.data) }}`
{%- for name in manifests | map(attribute="dataset") | unique if name != settings.data -%}
, from `{{ public(name) }}`
{%- endfor %}; tokenizer `{{ public(tokenizer) }}`
- **Training**: {{ "{:,} tokens in {:,} steps, to a loss of {:.4f}".format(samples * seq_len, step, loss) }}
{%- for found in (records | selectattr("val_loss", "number") | list)[-1:] %}
- **Evaluation**, after step {{ found.step }}:
  {{ monitor.results(dict(found.items() | rejectattr(1, "none"))) | join(", ") }}
{%- endfor %}
- **Recipe**:
{%- for name in ("size seq_len steps global_batch optimizer lr BETAS weight_decay grad_clip schedule warmup "
                 "min_lr decay ema dropout precision mask_rate bp_steps loss seed").split()
                if settings[name] is defined and settings[name] is not none %}
{{- "," if not loop.first }} {{ name }} {{ settings[name] }}
{%- endfor %}
- **License**: to be filled in, here and in the lines above

{% set version = "5.9" if model_config.h_cycles else "5.23" if model_config.modern else "4.48" -%}
**To use it** with transformers {{ version }} or later in this directory, or elsewhere with the name of its
repository instead of the dot:

```python
{% if masked -%}
from transformers import pipeline
fill = pipeline("fill-mask", ".")
print(fill(f"The {fill.tokenizer.mask_token} sat."))
{%- else -%}
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(".")
tokenizer = AutoTokenizer.from_pretrained(".")
ids = model.generate(**tokenizer("The", return_tensors="pt"), max_new_tokens=20)[0]
print(tokenizer.decode(ids, skip_special_tokens=True))
{%- endif %}
```
{%- if settings.trainer %}

**To train it further** in a clone of the project that has trained it, with this directory instead of `HF`:

```bash
torchrun --nproc_per_node=1 {{ settings.trainer }} --init-from hf:HF --data 'text:notes/*.txt'
```
{%- endif %}
{%- if commands %}

**It was trained** by

```bash
{%- for command in commands | unique %}
{% for word in shlex.split(command) if not word.startswith("--master_") -%}
{{ shlex.quote(public(word)) }}{{ " " if not loop.last }}
{%- endfor %}
{%- endfor %}
```
{%- endif %}
"""


def public(word: str) -> str:
    """A word of a command without the folders of absolute paths."""
    return re.sub(r"(^|[=:,])[/~][^,]*/(?=.)", r"\1", word)


def card_of(saved: dict) -> str:
    """The card of a checkpoint. What the files of its run and of its data no longer say is left out."""
    from jinja2 import Template  # comes with torch
    settings = saved["settings"]
    run = Path(saved["path"]).parent.parent
    manifests = []
    with suppress(UserError):  # one is damaged
        for source in sources_of(settings["data"]):
            manifests.append(read_manifest(directory_of(source, settings["tokenizer"])))
    return Template(CARD).render(
        saved, manifests=manifests, records=monitor.records_until(run, saved["step"], say),
        commands=monitor.read_config(run).get("commands"), monitor=monitor, shlex=shlex, public=public)


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
