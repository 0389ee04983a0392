"""Writes smollm2_greedy.json: how transformers continues prompts with SmolLM2, greedily.

The weights are those of the embedded default model, dequantised to float32 by transformers. Each
prompt has its text, its ids (the text, special tokens spelled out, encoded without adding any),
the ids generated (up to 48, the end token included), and for each of those the margin: by how much
the logit of the best token led that of the second. Another order of summation can flip a choice
whose margin is tiny, and it only.

    pip install -e '.[peers]'
    python tests/models/golden/make_greedy_golden.py
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers

from jaxserve.models.loading.fetch import default_model_path
from jaxserve.models.loading.gguf.header import read_gguf
from jaxserve.text.tokenizer import Tokenizer

MAX_TOKENS = 48

LEDGER = "".join(
    f"Day {day}: the {animal} ate {day * 3 % 17} {food} and slept {day * 5 % 11} hours.\n"
    for day, (animal, food) in enumerate(
        zip(["otter", "heron", "badger", "lynx"] * 7, ["herring", "acorns", "plums"] * 9), start=1
    )
)
STORY = (
    "The lighthouse at Kerran Point had been dark for eleven years when Mara Quill rowed out to "
    "it. She carried a lamp, a coil of rope, three jars of oil and a letter from her grandfather, "
    "who had kept the light through forty winters. The letter said that the lens was not broken, "
    "whatever the harbour board believed; that the winding stair missed its thirteenth step; and "
    "that under no circumstances should she trust the tide tables printed after the great storm. "
)

CHATS = {
    "chat_sky": ["Why is the sky blue?"],
    "chat_capital": ["What is the capital of France?"],
    "chat_recipe": ["Give me a simple recipe for pancakes."],
    "chat_poem": ["Write a short poem about the sea in winter."],
    "chat_code": ["Write a Python function that returns the n-th Fibonacci number."],
    "chat_arithmetic": ["What is 17 plus 25? Answer with the number only."],
    "chat_german": ["Erkläre in einem Satz, was Photosynthese ist."],
    "chat_many_turns": [
        "My name is Ada.",
        "Nice to meet you, Ada! How can I help you today?",
        "What is my name?",
    ],
    "chat_long_story": [STORY * 6 + "\nSummarize this story in one sentence."],
}
TEXTS = {
    "one_token": "The",
    "one_letter": "Q",
    "end_of_text_token": "<|endoftext|>",
    "sentence": "The quick brown fox jumps over the",
    "history": "In the year 1492, Christopher Columbus",
    "code_python": "def quicksort(items):\n    if len(items) <= 1:\n        return items\n",
    "code_c": "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n",
    "json": '{"name": "Alice", "age": 30, "children": [{"name": "Bob", "age":',
    "list": "Shopping list:\n1. Milk\n2. Eggs\n3. Bread\n4.",
    "numbers": "2, 4, 8, 16, 32, 64,",
    "repetitive": "row, row, row your boat, " * 8,
    "french": "Il était une fois, dans un petit village de Bretagne,",
    "spanish": "La capital de España es",
    "chinese": "北京是中国的",
    "emoji": "I love pizza 🍕 and sushi 🍣 and",
    "whitespace": "\n\n\n    \t",
    "long_ledger": LEDGER,
}


def conversation(turns: list[str]) -> list[dict[str, str]]:
    roles = ["user", "assistant"] * len(turns)
    return [{"role": role, "content": turn} for role, turn in zip(roles, turns)]


def main() -> None:
    path = default_model_path()
    tokenizer = Tokenizer.from_gguf(read_gguf(path).metadata)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    prompts = {
        name: tokenizer.apply_chat_template(conversation(turns)) for name, turns in CHATS.items()
    }
    lines = []
    for name, prompt in (prompts | TEXTS).items():
        prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
        generated = model.generate(
            torch.tensor([prompt_ids]),
            attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            eos_token_id=list(tokenizer.eos_token_ids),
            pad_token_id=tokenizer.eos_token_ids[0],
            return_dict_in_generate=True,
            output_logits=True,
        )
        best = torch.stack(generated.logits)[:, 0].topk(2).values
        entry = {
            "name": name,
            "prompt": prompt,
            "prompt_token_ids": prompt_ids,
            "output_token_ids": generated.sequences[0, len(prompt_ids) :].tolist(),
            "margins": [round(margin, 5) for margin in (best[:, 0] - best[:, 1]).tolist()],
        }
        lines.append(json.dumps(entry))
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    golden = Path(__file__).with_name("smollm2_greedy.json")
    golden.write_text(
        f'{{"versions": {json.dumps(versions)},\n"prompts": [\n' + ",\n".join(lines) + "\n]}\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
