"""What tests of tokens need: a small tokenizer whose tokens are words, and small files of samples."""

import json
from pathlib import Path
from typing import Any

SPECIAL = ["<pad>", "<end>", "<mask>", "<unk>", "<user>", "<assistant>", "<system>"]
WORDS = [f"w{i}" for i in range(200)]
PAD, END, MASK, UNKNOWN, USER, ASSISTANT, SYSTEM = range(len(SPECIAL))
FIRST_WORD = len(SPECIAL)
# The chat's messages, each ended: <user> w1 w2 <end> <assistant> w3 <end>
PLAIN_TEMPLATE = ("{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <end> {% endfor %}"
                  "{% if add_generation_prompt %}<assistant> {% endif %}")  # fmt: skip
MARKED_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }} <end> "
    "{% endgeneration %}{% else %}{{ m['content'] }} <end> {% endif %}{% endfor %}"
)
# What comes first depends on how much follows.
SHIFTING_TEMPLATE = "{% for i in range(messages | length) %}<system> {% endfor %}" + PLAIN_TEMPLATE


def word_tokenizer(folder: Path, template: str = PLAIN_TEMPLATE, *, mask: bool = True, words: int = 200) -> str:
    """Writes a fast tokenizer, as transformers does. A word's id is its number + FIRST_WORD."""
    folder.mkdir(parents=True, exist_ok=True)
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *WORDS[:words]])}
    whole = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None, "decoder": None,
        "added_tokens": [{"id": i, "content": word, **special} for i, word in enumerate(SPECIAL)],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }  # fmt: skip
    named = {f"{name}_token": f"<{word}>" for name, word in (("eos", "end"), ("pad", "pad"), ("unk", "unk"))}
    named |= {"mask_token": "<mask>"} if mask else {}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, **named}
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


def text(*numbers: int) -> str:
    return " ".join(f"w{n}" for n in numbers)


def ids(*numbers: int) -> list[int]:
    return [n + FIRST_WORD for n in numbers]


def json_lines(path: Path, values: list[Any], field: str = "text") -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({field: value, "other": 1}) + "\n" for value in values))
    return str(path)


def chat(*contents: str) -> list[dict[str, str]]:
    """Of a user and an assistant in turns."""
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def uneven(count: int, most: int) -> list[str]:
    """Texts of 1 to `most` words."""
    return [text(*((7 * i + j) % 200 for j in range(1 + i * 5 % most))) for i in range(count)]
