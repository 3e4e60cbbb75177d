#!/usr/bin/env python3
"""Which tokens of a conversation are the assistant's, as transformers' return_assistant_tokens_mask has it.

tests/reference/assistant_masks.py writes tests/reference/data/assistant_masks.json (needs `transformers` 5 and jinja2): a
list of cases, each with the family of a tokenizer in tests/reference/data/tokenizers, a template, and lines of
conversations with their tokens and masks.
"""
import json
import os

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

HERE = os.path.dirname(os.path.abspath(__file__))
CHATML = """{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}{% if message.role == 'assistant' %}\
{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ message.content + '<|im_end|>' }}\
{% endif %}{{ '\\n' }}{% endfor %}"""
# Borders within words and lines: tokens that lie across one count.
PLAIN = """{% for message in messages %}{% if message.role == 'assistant' %}\
A{% generation %}{{ message.content }}{% endgeneration %}B
{% else %}Q{{ message.content }}
{% endif %}{% endfor %}"""
WORDS = ["The quick brown fox's", "12345 été e\u0301te\u0301 naïve", "你好，世界 😀👍🏽", "x = {'a': [1, 2]}\n\n\nreturn", "\n\nafter lines\n",
         "مرحبا", "over it'll", "ﬁne ½", "o\u0302\u0323", "word"]


def conversations():
    for i in range(len(WORDS)):
        turns = [{"role": role, "content": WORDS[(i + 3 * k) % len(WORDS)]}
                 for k, role in enumerate(["system", "user", "assistant", "user", "assistant"][i % 2:])]
        yield {"messages": turns}
    yield {"messages": [{"role": "user", "content": "nothing said"}]}


cases = []
for family in ("mistral", "gemma"):  # which know every byte: of others here unknown characters are left out
    with open(os.path.join(HERE, "data", "tokenizers", family + ".json"), encoding="utf-8") as file:
        described = json.dumps(json.load(file)["tokenizer"])
    for template in (CHATML, PLAIN):
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(described), chat_template=template)
        lines = []
        for one in conversations():
            made = tokenizer.apply_chat_template(one["messages"], tokenize=True, return_dict=True,
                                                 return_assistant_tokens_mask=True)
            lines.append({"line": json.dumps(one, ensure_ascii=False), "ids": made["input_ids"],
                          "mask": made["assistant_masks"]})
        cases.append({"family": family, "template": template, "lines": lines})
with open(os.path.join(HERE, "data", "assistant_masks.json"), "w", encoding="utf-8") as file:
    json.dump(cases, file, ensure_ascii=False, separators=(",", ":"))
    file.write("\n")
print(sum(len(case["lines"]) for case in cases), "conversations,",
      sum(sum(line["mask"]) for case in cases for line in case["lines"]), "tokens of the assistant")
