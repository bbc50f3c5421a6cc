"""`completions`: the training's language model continues texts, on all ranks together, between two steps.

Prompt i is that of rank i modulo the world size. All ranks compute equally many forwards, since each gathers parameters of
all: a rank whose text is at its end goes on until all are, and drops those tokens. No rank holds more parameters at
once than in the forward of a step.

Note: why not `generate` of transformers. It calls parts of a model by themselves, and the model inside of its wrapper. Under
FSDP the forward of the root module alone gathers what it needs, so the loop here calls that alone, with transformers'
cache of keys and values where the model has one, and transformers' classes for sampling."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from fsdp_lab.backends import Backend
from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.base.generation import Completion, Prompt, Sampling, checked_prompts, prompt_text
from fsdp_lab.models.batches import Batches
from fsdp_lab.models.configs import resolve
from fsdp_lab.models.presets import facts_of
from fsdp_lab.models.tokens import InexactChat
from fsdp_lab.rank.trainer import Trainer
from fsdp_lab.spec.spec import Spec
from fsdp_lab.wire import Wire


def encoded(spec: Spec, batches: Batches, prompts: Sequence[Prompt], sampling: Sampling) -> list[list[int]]:
    """The tokens of each prompt for the model of `spec`: of a chat, and of a text where the data are chats, by the template,
    up to where the answer begins. Raises ArgumentError: it continues no text, or none as long."""
    if spec.workload.is_own:
        hint = "call it in a %%px cell, or train a model of transformers"
        raise ArgumentError("prompts", "the model is your own module, of which no tokenizer is known", hint)
    facts = facts_of(resolve(spec.workload.model))
    if facts.kind not in ("causal", "seq2seq"):
        does = "classifies images" if facts.kind == "image" else "fills masked tokens"
        hint = "train a causal or encoder-decoder model, such as gpt2-1m"
        raise ArgumentError("prompts", f"{facts.model_type} {does} and does not continue a text", hint)
    tokenizer, texts = batches.tokenizer, []
    for prompt in checked_prompts(prompts):
        chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        is_text = isinstance(prompt, str) and not batches.source.is_chat
        try:
            texts += tokenizer.encode([str(prompt)], whole=True) if is_text else [tokenizer.encode_prompt(chat)]
        except InexactChat as e:
            raise ArgumentError("prompts", f"{_short(prompt)} is a chat, and {e}", "give a text instead") from None
    most = facts.max_positions
    for prompt, ids in zip(prompts, texts, strict=True):
        if not ids:
            raise ArgumentError("prompts", f"{_short(prompt)} has no tokens", "give a text with words in it")
        if most is None:
            continue
        needs = max(len(ids), sampling.new_tokens) if facts.kind == "seq2seq" else len(ids) + sampling.new_tokens
        if needs > most:
            long = f"{_short(prompt)} has {len(ids)} tokens, and with {sampling.new_tokens} new ones it is longer than"
            hint = "give a shorter text, or fewer new_tokens"
            raise ArgumentError("prompts", f"{long} the model's {most} positions", hint)
    return texts


def completions(
    trainer: Trainer, prompts: Sequence[Prompt], texts: Sequence[Sequence[int]], sampling: Sampling
) -> dict[int, Completion]:
    """Returns how this rank's prompts go on, by their numbers; collective. `texts`: of `encoded`. Raises as `complete`."""
    if not texts:
        return {}
    tokenizer, config = trainer.batches.tokenizer, resolve(trainer.spec.workload.model)
    start = int(config.decoder_start_token_id) if config.is_encoder_decoder else None
    ends, done = frozenset({tokenizer.end_id}), dict[int, Completion]()
    new = complete(trainer.backend, trainer.world, texts, sampling, ends=ends, start=start)
    for number, ids in new.items():  # tokens that begin a text may lose the space in front of them
        before = [] if config.is_encoder_decoder else texts[number]
        whole, begin = tokenizer.decode([*before, *ids]), tokenizer.decode(before)
        text = whole.removeprefix(begin) if whole.startswith(begin) else tokenizer.decode(ids)
        done[number] = Completion(prompt=prompt_text(prompts[number]), text=text)
    return done


def _short(prompt: Prompt) -> str:
    text = prompt_text(prompt)
    return repr(text if len(text) <= 40 else f"{text[:39]}…")


def complete(
    backend: Backend,
    world: Wire,
    texts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    ends: frozenset[int] = frozenset(),
    start: int | None = None,
) -> dict[int, list[int]]:
    """Returns the tokens that follow this rank's texts, by their numbers; collective. `texts`: token ids of all prompts, the
    same on every rank. `ends`: tokens that end a text; they are returned too. `start`: the first token of the decoder, of an
    encoder-decoder model; None: the model has only a decoder. Raises RankAborted or WireTimeout."""
    rank, ranks = world.rank(), world.size()
    done: dict[int, list[int]] = {}
    with backend.evaluating():
        for first in range(0, len(texts), ranks):
            number = first + rank
            own = number < len(texts)
            text = _Text(backend, texts[number if own else first], _Choice(sampling, number, backend.device), start)
            new: list[int] = []
            while _any(world, goes_on := own and len(new) < sampling.new_tokens and not ends & {*new[-1:]}):
                token = text.next()
                if goes_on:
                    new.append(token)
            world.context.set_unit("")
            if own:
                done[number] = new
    return done


def _any(world: Wire, mine: bool) -> bool:
    """Whether it is true of some rank. An abort is heard here, also under DDP, whose forward has no collective."""
    world.context.check()
    flag = torch.tensor([float(mine)], dtype=torch.float64)
    world.control(flag)
    return bool(flag.item())


class _Text:
    """One text and the model's cache of it, if it has one."""

    def __init__(self, backend: Backend, prompt: Sequence[int], choice: "_Choice", start: int | None) -> None:
        self._backend, self._choice = backend, choice
        ids = torch.tensor([list(prompt)], device=backend.device)
        self._fixed: dict[str, Any] = {"use_cache": True}
        if start is None:
            self._name, self._ids = "input_ids", ids
        else:
            self._fixed["input_ids"] = ids
            self._name, self._ids = "decoder_input_ids", torch.tensor([[start]], device=backend.device)

    def next(self) -> int:
        out = self._backend.outputs({**self._fixed, self._name: self._ids})
        if "encoder_last_hidden_state" in out:
            self._fixed.pop("input_ids", None)
            self._fixed["encoder_outputs"] = (out["encoder_last_hidden_state"],)
        token = self._choice.of(self._ids, out["logits"][:, -1].float())
        if (cache := out.get("past_key_values")) is None:
            self._ids = torch.cat([self._ids, token], 1)
        else:
            self._fixed["past_key_values"], self._ids = cache, token
        return int(token)


class _Choice:
    """Chooses a token by its logits."""

    def __init__(self, sampling: Sampling, number: int, device: torch.device) -> None:
        self._draws = sampling.temperature > 0
        changes: list[Any] = []
        if sampling.temperature not in (0.0, 1.0):
            changes.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.top_k is not None:
            changes.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p is not None:
            changes.append(TopPLogitsWarper(float(sampling.top_p)))
        self._change = LogitsProcessorList(changes)
        self._generator = torch.Generator(device).manual_seed(sampling.seed * 1_000_003 + number)

    def of(self, ids: Tensor, logits: Tensor) -> Tensor:
        """[1, 1], from logits [1, vocabulary]."""
        if not self._draws:
            return logits.argmax(-1, keepdim=True)
        probabilities = self._change(ids, logits).softmax(-1)  # type: ignore[arg-type]
        return torch.multinomial(probabilities, 1, generator=self._generator)
