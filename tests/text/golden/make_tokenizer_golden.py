"""Writes tokenizer_smollm2.json: texts and their ids under SmolLM2's own tokenizer.

Two independent implementations must agree on every text before anything is written: llama.cpp,
and the Hugging Face tokenizer of the same GGUF file. The latter gets the pre-tokenizer of the
`tokenizer.json` published as HuggingFaceTB/SmolLM2-135M-Instruct, because reading a GGUF file
transformers leaves out its splitting of digits.

    pip install -e '.[peers]'
    python tests/text/golden/make_tokenizer_golden.py
"""

from __future__ import annotations

import json
from pathlib import Path

from llama_cpp import Llama
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from jaxserve.models.loading.fetch import default_model_path

TEXTS = [
    "",
    " ",
    "Why is the sky blue?",
    "  two leading spaces, two trailing  ",
    "\n",
    "\n\n\n",
    "a\n\n b\n  c\r\n\td\t\te",
    "        eight spaces",
    "   123",
    " 7",
    "In 1984 there were 3,141,592.65 of them, 50% off: $1.50!",
    "x1y22z333",
    "½ ² Ⅷ ٣٤٥ १२३",
    "I'm sure they'll say we've won; don't you'd? I'LL NOT.",
    "'s 't 're '' \"quoted\" `code` --flag",
    "CamelCase snake_case kebab-case SCREAMING_CASE",
    "antidisestablishmentarianism pneumonoultramicroscopicsilicovolcanoconiosis",
    "def f(x: int) -> int:\n    '''Doc.'''\n    return x ** 2  # square\n",
    "for (int i = 0; i < n; ++i) {\n\ta[i] += b[i] * 0x1F;\n}\n",
    '<div class="a b">&nbsp;<br/></div>',
    '{"key": [1, 2.5e-3, null, true], "nested": {"a": "\\u00e9"}}',
    "SELECT * FROM t WHERE a >= 10 AND b != 'x';",
    "https://example.org/a/b?c=d&e=f#g user@example.org",
    "E = mc^2, a_{ij} \\approx \\frac{1}{2}, ∑∫√∞≠≤",
    "naïve café Ångström Straße ÆØÅ œuvre",
    "e\u0301 versus \u00e9, \ufb01 ligature",
    "中文字符，没有空格。",
    "日本語のテキスト、カタカナとひらがな。",
    "한국어 텍스트입니다",
    "مرحبا بالعالم، كيف حالك؟",
    "שלום עולם",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "Привет, мир! Україна",
    "Γειά σου Κόσμε",
    "🙂 😀😀 👍🏽 🇺🇸 👩‍👩‍👧 ❤️",
    "zero\u200bwidth\u200djoiner \ufeffbom \u00a0nbsp\u3000ideographic",
    "𝒳𝔘 𐍈 \U0001f9ec",
    "\x00\x01\x7f control",
    "!!!???...,,,;;;:::",
    "####### Heading\n- item\n* item\n1. item\n",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "................................",
    "------------------------------------------------",
    "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|>",
    "a<|im_end|>b <|im_end|> c",
    "<|im_start|",
    "<repo_name>x<file_sep>y<jupyter_code>z",
    "Ġ▁Ċ are letters too",
    "The quick brown fox jumps over the lazy dog. " * 4,
    "\ufffd replacement",
]


def main() -> None:
    path = default_model_path()
    published = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).backend_tokenizer
    published.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    llama_cpp = Llama(str(path), vocab_only=True, verbose=False)
    lines = []
    for text in TEXTS:
        ids = published.encode(text, add_special_tokens=False).ids
        if text:  # llama.cpp refuses the empty text
            other = llama_cpp.tokenize(text.encode(), add_bos=False, special=True)
            if ids != other:
                raise SystemExit(f"the implementations disagree on {text!r}: {ids} and {other}")
        lines.append(json.dumps({"text": text, "ids": ids}))
    golden = Path(__file__).with_name("tokenizer_smollm2.json")
    golden.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
