#!/usr/bin/env python3
"""Chat templates and what transformers' apply_chat_template makes of conversations with them.

tests/reference/chat_templates.py writes tests/reference/data/chat_templates.json (needs `transformers` 5 and jinja2): a
list of cases, each with the folder's files and lines of conversations with the text that is expected of them.
"""
import json
import os

from transformers import PreTrainedTokenizerFast
from tokenizers import Tokenizer, models

# As ChatML is, with a system message where there is none, tools, and roles that must be known.
MARKS = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}{{ "\\n" }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('Unknown role ' + message.role) }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message.role == 'assistant' %}{% generation %}{{ message.content | trim }}<|im_end|>{% endgeneration %}
    {%- else %}{{ message.content }}<|im_end|>{% endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
# Blocks on lines of their own (trimmed), special tokens, namespaces, a loop that ends early, lists as content.
BLOCKS = """{{ bos_token }}
{% set ns = namespace(turns=0) %}
{% for message in messages %}
    {% if message.role == 'stop' %}
        {% break %}
    {% endif %}
    {% set ns.turns = ns.turns + 1 %}
[{{ message.role | upper }} {{ loop.index }}]
    {% if message.content is string %}
{{ message.content }}{{ eos_token }}
    {% else %}
        {% for part in message.content %}
{{ part | tojson(indent=1) }}
        {% endfor %}
    {% endif %}
{% endfor %}
{{ ns.turns }} turns {{ sep_token }}
"""


def said(*messages, **more):
    return {"messages": [{"role": role, "content": content} for role, content in messages], **more}


CONVERSATIONS = [
    said(("user", "Hello <b>&</b> \"you\""), ("assistant", "  Bonjour, é 😀 \n")),
    said(("system", "S"), ("user", "a\n\nb"), ("assistant", "c"), ("user", "d"), ("assistant", "")),
    said(("user", "x"), tools=[{"name": "é<now>", "arguments": {"b": 1, "a": [True, None, 1.5]}}]),
]
LISTS = [said(("user", [{"type": "text", "text": "<é>"}]), ("stop", "x"), ("user", "never"))]

cases = []
for name, template, config, conversations in [
    ("tokenizer_config.json", MARKS, {"eos_token": "<|im_end|>"}, CONVERSATIONS),
    ("chat_template.jinja", BLOCKS, {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}, CONVERSATIONS + LISTS),
]:
    plain = {key: value["content"] if isinstance(value, dict) else value for key, value in config.items()}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=template, **plain)
    files = {"tokenizer_config.json": json.dumps(config)}
    if name == "tokenizer_config.json":
        files[name] = json.dumps({**config, "chat_template": template})
    else:
        files[name] = template
    lines = [{"line": json.dumps(one, ensure_ascii=False),
              "text": tokenizer.apply_chat_template(one["messages"], tools=one.get("tools"), tokenize=False)}
             for one in conversations]
    cases.append({"files": [{"name": name, "content": content} for name, content in files.items()], "lines": lines})
here = os.path.dirname(os.path.abspath(__file__))
with open(os.path.join(here, "data", "chat_templates.json"), "w", encoding="utf-8") as file:
    json.dump(cases, file, ensure_ascii=False, indent=1)
    file.write("\n")
