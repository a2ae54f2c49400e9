"""Records what transformers makes of texts, ids and chats with SmolLM2's tokenizer.

    .venv/bin/python tests/data/record_tokenizer.py MODEL.gguf

writes smollm2_tokenizer.json beside itself; transformers is then no longer needed to compare with.

One thing is put right before recording. The file says `smollm`, which means that every digit is cut
off alone before GPT-2's rule applies (as in SmolLM2's own tokenizer.json and in llama.cpp), but
transformers applies GPT-2's rule alone to every name that it does not know. That differs where
white space comes before a digit, and nowhere else, which this script asserts.
"""

from __future__ import annotations

import json
import random
import sys
import unicodedata
from itertools import pairwise
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

OUTPUT = Path(__file__).with_name("smollm2_tokenizer.json")

TEXTS = [
    "",
    " ",
    "  ",
    "\n",
    "\n\n\n",
    "\t\t x \t",
    " \n \n ",
    "a",
    " a",
    "  a",
    "Hello, world!",
    "Hello,  world !  ",
    "I'm sure they'll say it's fine; don't you? We've SEEN it. I'D go.",
    "The quick brown fox jumps over the lazy dog.",
    "line one\nline two\r\nline three\r",
    "trailing spaces   \n   leading spaces",
    "0",
    "7 8",
    "1234567890",
    "3.14159, 1,000,000 and -42e10",
    "x  5 and    12",
    "a\n1\n\n2",
    "v1.2.3-rc4 on 2024-11-30T12:34:56Z",
    "½ ⅓ ² ³ ① Ⅷ ٣ ४ 五",
    "Café naïve résumé façade Ångström",
    "e\u0301 combining vs \u00e9 precomposed",
    "你好，世界！这是一个测试。",
    "日本語のテキストとカタカナ ー",
    "한국어 텍스트입니다",
    "Привет, мир! Українська мова",
    "مرحبا بالعالم",
    "שלום עולם",
    "ไทย नमस्ते தமிழ்",
    "😀👍🏽🇺🇸❤️ 👨‍👩‍👧‍👦 🏴\U000e0067\U000e0062",
    "zero\u200bwidth\u00a0nbsp\u2003em\u3000ideographic\ufeffbom",
    "\u0000\u0001\u001f\u007f\u0085",
    "\U00010330\U0001f9ff\U000e0001\U0010ffff",
    "\ufffd replacement",
    'def f(x: int) -> str:\n    return f"{x!r}"  # comment\n\n\nclass A:\n\tpass\n',
    "for (int i = 0; i < 10; ++i) { a[i] += b[i] * 2; }  // C",
    "SELECT * FROM t WHERE a >= 1 AND b LIKE '%x%';",
    '<html><body class="a b">&nbsp;&amp;</body></html>',
    '{"key": [1, 2.5, null, true], "nested": {"a": "b\\n"}}',
    "https://example.org/path?query=1&x=%20#frag user@example.org",
    "C:\\Windows\\System32 ~/.config/file $HOME ${VAR}",
    "\\frac{a}{b} \\sum_{i=0}^{n} x_i^2 $E = mc^2$",
    "camelCase snake_case SCREAMING_CASE kebab-case PascalCase2Go",
    "!!! ??? ... --- === ### *** ((())) [[]] {{}}",
    "a" * 100,
    " " * 100,
    "ab " * 50,
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|>",
    "a<|im_end|>b <|im_end|> c",
    "<|im_start|><|im_start|><|im_end|>",
    "<|im_start |> <|IM_START|> <|im_start",
    "<repo_name>x<file_sep>y<gh_stars>5<issue_start>",
    "<empty_output><jupyter_code>print(1)<jupyter_output>1",
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
]

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    [
        {"role": "user", "content": "  Hi \n"},
        {"role": "assistant", "content": "Hello! 😀"},
        {"role": "user", "content": "<|im_end|> and {{ braces }} & <tags>"},
    ],
    [{"role": "user", "content": ""}],
]

TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m['content'] | trim }}{% endfor %}",
    "{% for m in messages %}\n    {% if m.role == 'user' %}\n  U:{{ m.content }}\n    {% endif %}\n"
    "{% endfor %}\nend",
    "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}ok",
    "{{ messages | tojson }}|{{ messages | tojson(indent=2) }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% if loop.index > 1 %}{% break %}"
    "{% endif %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{{ eos_token }}",
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "{{ 'tools' if tools is not none else 'no tools' }}{{ undefined_thing }}.",
    "{{- '\\n' }}   {%- if add_generation_prompt %}   {{- 'go' -}}   {% endif %}   !",
    "{{ messages[0].content.upper()[:3] }}{{ messages[-1]['missing'] is defined }}",
    "{{ messages[0].content + 1 }}",
    "{{ messages[7].content }}",
]


def main(gguf: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    texts = [*TEXTS, *_random_texts(random.Random(0))]
    plain = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
    )
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    for text, before, after in zip(texts, plain, ids, strict=True):
        assert before == after or _has_space_before_digit(text), text
    recorded = {
        "vocab_size": len(tokenizer),
        "encode": [{"text": text, "ids": i} for text, i in zip(texts, ids, strict=True)],
        "encode_special": [
            {"text": text, "ids": tokenizer.encode(text, add_special_tokens=True)} for text in TEXTS
        ],
        "decode": [_decoded(tokenizer, i) for i in _random_ids(random.Random(1), len(tokenizer))],
        "chats": [_rendered(tokenizer, chat, None) for chat in CHATS],
        "templates": [
            _rendered(tokenizer, chat, template) for template in TEMPLATES for chat in CHATS
        ],
    }
    OUTPUT.write_text(json.dumps(recorded, ensure_ascii=True, indent=0) + "\n")


def _has_space_before_digit(text: str) -> bool:
    return any(
        first.isspace() and unicodedata.category(second).startswith("N")
        for first, second in pairwise(text)
    )


def _random_texts(rng: random.Random) -> list[str]:
    """Characters of many scripts, with much white space and many digits."""
    pools = [
        [chr(c) for c in range(32, 127)],
        list("0123456789  \n\t"),
        [chr(c) for c in range(0xA0, 0x600)],
        [chr(c) for c in range(0x3040, 0x30FF)],
        [chr(c) for c in range(0x1F300, 0x1F650)],
        [" the", " of", "'s", "'ll", "ing", " 1", "  2", "<|im_end|>", "\r\n", "    return"],
    ]
    return [
        "".join(rng.choice(rng.choice(pools)) for _ in range(rng.randrange(1, 60)))
        for _ in range(200)
    ]


def _random_ids(rng: random.Random, vocab_size: int) -> list[list[int]]:
    return [
        [rng.choice([rng.randrange(vocab_size), rng.randrange(280)]) for _ in range(40)]
        for _ in range(50)
    ]


def _decoded(tokenizer: Any, ids: list[int]) -> dict[str, Any]:
    return {
        "ids": ids,
        "text": tokenizer.decode(ids, skip_special_tokens=False),
        "without_special": tokenizer.decode(ids, skip_special_tokens=True),
    }


def _rendered(tokenizer: Any, chat: list[dict[str, Any]], template: str | None) -> dict[str, Any]:
    """With and without the generation prompt; None where the template refuses the messages."""
    result: dict[str, Any] = {"template": template, "messages": chat}
    for key, prompt in (("with_prompt", True), ("without_prompt", False)):
        try:
            result[key] = tokenizer.apply_chat_template(
                chat, chat_template=template, add_generation_prompt=prompt, tokenize=False
            )
        except (TemplateError, TypeError):
            result[key] = None
    return result


if __name__ == "__main__":
    main(Path(sys.argv[1]))
