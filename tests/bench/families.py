"""`python -m tests.bench families`: all families of transformers that the lab takes, as small as they can be built.

Note: each family trains three steps on two ranks with what its config draws: by the lab's engine, again, resumed after the
first step, and under each backend. It *trains* if no number differs: losses and values bit for bit, under FSDP1 and DDP
losses to 1e-5. It is *refused* where the lab says why. It has *no small config* where transformers alone does not compute it
either. All else has *failed*."""

import argparse
import re
import resource
import shutil
import tempfile
import textwrap
import time
import warnings
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig
from transformers.models.auto import configuration_auto, modeling_auto

from fsdp_lab.base.errors import ArgumentError, FieldError, SpecError
from fsdp_lab.cli.bench import say
from fsdp_lab.cli.console import at_least
from fsdp_lab.engine import ShardError
from fsdp_lab.models.build import _HEADS
from fsdp_lab.models.configs import resolve
from fsdp_lab.models.flops import empty_batch
from fsdp_lab.models.presets import facts_of
from fsdp_lab.spec.checkpoint_format import find
from fsdp_lab.spec.spec import Spec
from tests.pool import Place, Pool, RankError
from tests.rank.test_session import session

LIMIT_S = 120.0
VOCABULARY = 384  # those of bytes are below 259
PIXELS = 64
TRAINS, REFUSED, NO_CONFIG, FAILED = "trains", "refused", "no small config", "failed"
BACKENDS: dict[str, dict[str, Any]] = {
    "fsdp2": {"backend": "fsdp2"}, "fsdp1": {"backend": "fsdp1"}, "ddp": {"backend": "ddp", "sharding": "no_shard"},
}  # fmt: skip
LOOSE = ("fsdp1", "ddp")  # they add up in another order, and FSDP1 steps parameters that got no gradient
RELATIVE = 1e-5
AGAIN, RESUMED = "again", "resumed"  # further runs of the lab

# -- small configs -----------------------------------------------------------------------------------------------------

# The most that a number may be, by the name of its field: the first pattern that matches counts.
SIZES: tuple[tuple[str, int], ...] = (
    (r"(unpadded_|\w+_)?vocab_size(_per_layer_input)?", VOCABULARY), (r"image_size|crop_size", PIXELS),
    (r"(num_|n_)?((encoder|decoder|hidden|speech_encoder|t2u_\w+|loop|global|sparse_\w+)_)*(layers?|blocks)|depth", 2),
    (r"full_attention_interval|\w*(layer_period|sparse_step|_pattern|layer_interval|layer_freq\w*)", 2),
    (r"first_k_dense_replace|\w*layer_offset|num_dense_layers|n_group|topk_group|(mamba_)?n_groups", 1),
    (r"num_kv_shared_layers", 1), (r"num_experts_per_to\w+|(moe_|router_)?top_?k|moe_k|num_selected_experts", 2),
    (r"(\w+_)?num_(local_|routed_)?experts|n_routed_experts|zero_expert_num", 4),
    (r"\w*kv_heads|\w*num_key_value_heads|\w*key_heads", 2),
    (r"(\w+_)?(num_|n_)(\w+_)?heads?|\w*attention_heads|num_query_groups", 4), (r"qk_head_dim|\w*_rank|d_rel", 16),
    (r"\w*head_dim|d_kv|d_head|dim_head|kv_channels|attention_head_size|rotary_dim", 8),
    (r"\w*(position_embeddings|positions|n_ctx|max_seq_len|context_length|model_max_length)", 64),
    (r"\w*(sliding_window(_size)?|window_size|attention_window|chunk_size|block_size|num_landmarks)", 8),
    (r"\w*(segment_means_seq_len|attn_chunk_length)", 8), (r"\w*(state_size|d_state)", 4),
    (r"\w*(intermediate_size(_mlp)?|ffn_dim|d_ff|d_inner|ffn_hidden_size|feed_forward_size)", 64),
    (r"attention_hidden_size", 64),
    (r"\w*(hidden_size|embedding_dim|embed_dim|embedding_size|proj_dim|output_dim|input_dim)\w*", 32),
    (r"d_model|n_embd|dim|emb_dim|hidden_dim|lru_width|d_latents", 32),
)  # fmt: skip
# Of lists: the most that each number may be, and what a list of widths begins with.
DEPTHS = r"depths?|stage_num_blocks|stage_numb_of_layers|n_attn_blocks|num_block_repeats"
WIDTHS = r"hidden_sizes|embed_dims?|base_attn_unit_dims|neck_hidden_sizes"
# What does not follow from names: numbers that depend on others, and fields that have no default.
CORRECTIONS: Mapping[str, Mapping[str, Any]] = {
    "bailing_hybrid": {"num_expert_group": 1},
    "bit": {"num_groups": 8},
    "blt": {"encoder_hash_byte_group_vocab": 500},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "cvt": {"embed_dim": [8, 16, 16], "num_heads": [1, 2, 2], "depth": [1, 2, 3]},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    **{name: {"embed_dim": 24, "depths": [1, 1], "num_heads": [3, 6], "window_size": 4}
       for name in ("donut-swin", "swin", "swinv2")},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "efficientnet": {"in_channels": [32, 16], "out_channels": [16, 24], "kernel_sizes": [3, 3], "strides": [1, 2],
                     "hidden_dim": 2560, "num_block_repeats": [1, 2], "expand_ratios": [1, 2], "num_hidden_layers": 12},
    "encoder-decoder": {"pad_token_id": 0, "decoder_start_token_id": 0},
    "esm": {"pad_token_id": 0, "mask_token_id": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hgnet_v2": {"hidden_sizes": [32, 32, 64, 64], "stage_in_channels": [48, 32, 32, 64], "stage_mid_channels": [16] * 4,
                 "stage_out_channels": [32, 32, 64, 64], "stage_numb_of_layers": [2] * 4},
    **{name: {"head_dim": 8} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "mobilebert": {"embedding_size": 16, "intra_bottleneck_size": 32, "true_hidden_size": 32},
    "nemotron": {"num_key_value_heads": 4},
    "neomme": {"head_dim": 16},
    "poolformer": {"hidden_sizes": [16, 32, 80, 128], "num_encoder_blocks": 4},
    "pvt": {"num_encoder_blocks": 4, "hidden_sizes": [16, 32, 80, 128]},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [4, 8], "attn_layers": ["local", "lsh"]},
    "textnet": {"stem_out_channels": 16},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_head_dim": 16, "n_mamba_heads": 2, "layers_block_type": ["mamba", "hybrid"]},
    "zamba2": {"attention_head_dim": 16, "mamba_headdim": 16, "n_mamba_heads": 4,
               "layers_block_type": ["mamba", "hybrid"]},
}  # fmt: skip


def known_families() -> list[str]:
    """The model types for which transformers has a head with a loss that the lab trains."""
    known = []
    for name in configuration_auto.CONFIG_MAPPING_NAMES:  # type: ignore[attr-defined]
        with suppress(SpecError):
            facts_of({"model_type": name})
            known.append(name)
    return sorted(known)


def small(name: str) -> dict[str, Any]:
    """A small config of a family, from its own default."""
    return {
        "model_type": name,
        "image_size": PIXELS,  # kept by those that have no such field, as the size of the images
        **_smaller(AutoConfig.for_model(name)),
        **CORRECTIONS.get(name, {}),
    }


def _smaller(config: Any) -> dict[str, Any]:
    """What is changed in a config, and in those inside it."""
    found: dict[str, Any] = {}
    ids = iter(range(300, VOCABULARY))  # which no text has
    for name, value in vars(config).items():
        is_numbers = isinstance(value, (list, tuple)) and value and all(type(v) is int for v in value)
        if hasattr(value, "model_type"):
            found[name] = {"model_type": value.model_type, **_smaller(value)}
        elif re.fullmatch(r"\w+_token_(id|index)", name):
            if (value[0] if is_numbers else value or 0) >= VOCABULARY:
                found[name] = 0 if name == "pad_token_id" else 1 if name == "eos_token_id" else next(ids)
        elif name == "vocab_size":
            found[name] = VOCABULARY
        elif type(value) is int:
            most = next((most for pattern, most in SIZES if re.fullmatch(pattern, name)), value)
            if "key_value" in name and value == vars(config).get("num_attention_heads"):
                most = 4  # those that have as many as heads may take no other number
            if most < value:
                found[name] = most
        elif is_numbers and name == "image_size":
            found[name] = [PIXELS] * len(value)
        elif is_numbers and re.fullmatch(DEPTHS, name):
            found[name] = [min(v, 2) for v in value]
        elif is_numbers and re.fullmatch(WIDTHS, name):
            found[name] = [max(8, -(-16 * v // value[0] // 8) * 8) for v in value]
    return found


# -- in a rank ---------------------------------------------------------------------------------------------------------
def _tried(place: Place, name: str, folder: str) -> dict[str, Any]:
    """What each run of a family told: its losses and values, or a text, why there are none."""
    warnings.simplefilter("ignore")
    runs: dict[str, Any] = {}
    told: dict[str, Any] = {"kind": facts_of({"model_type": name}).kind, "parameters": 0, "runs": runs}

    @contextmanager
    def noted(run: str) -> Iterator[None]:
        try:
            yield
        except (FieldError, ShardError) as e:
            runs[run] = f"{REFUSED}: {_line(e)}"
        except Exception as e:  # of any class
            runs[run] = f"{FAILED}: {type(e).__name__}: {_line(e)}"

    with noted("lab"):
        data: dict[str, Any] = {"data": "images"} if told["kind"] == "image" else {"seq_len": 32}
        spec = Spec(world_size=2).replace(model=small(name), micro_batch=2, lr=1e-3, dropout="config", **data)
    if runs:
        return {**told, "alone": _alone(name)}
    s = session(place, reduction="rank_ordered", timeout_s=LIMIT_S / 2)
    with noted("lab"):
        told["parameters"] = s.apply("lab", spec.to_dict(), fresh=True)["parameters"]
        first = s.train(1)["events"]
        s.save(folder)
        runs["lab"] = _numbers([*first, *s.train(2, checks=[2])["events"]])
        s.saves(LIMIT_S)
    if isinstance(runs["lab"], list):
        for run, changes in (BACKENDS | {AGAIN: {}}).items():
            with noted(run):
                s.apply(run, spec.replace(**changes).to_dict(), fresh=True)
                runs[run] = _numbers(s.train(3, checks=[2])["events"])
        with noted(RESUMED):  # after a collective call: rank 0 has made the checkpoint
            s.restore(RESUMED, spec.to_dict(), str(find(folder).path))
            runs[RESUMED] = _numbers([*first, *s.train(2, checks=[2])["events"]])
    told["alone"] = _alone(name) if isinstance(runs["lab"], str) else ""
    told["rank_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    s.close()
    return told


def _numbers(events: Sequence[Mapping[str, Any]]) -> list[Any]:
    return [*(e["mean_loss"] for e in events), events[-1]["checksum"]]


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _alone(name: str) -> str:
    """Why transformers alone does not compute the same config, or ""."""
    try:
        config = resolve(small(name))
        facts = facts_of(config)
        classes = getattr(modeling_auto, _HEADS[facts.kind])[type(config)]
        model_class = classes[0] if isinstance(classes, tuple) else classes
        text = getattr(config, "text_config", None)
        model = model_class._from_config(text if type(text) is model_class.config_class else config).train()
        batch = {n: torch.ones_like(t) for n, t in empty_batch(facts, 2, 32, device="cpu").items()}
        model(**batch).loss.backward()
    except SpecError as e:
        return _line(e) if "refuses the config" in str(e) else ""
    except Exception as e:  # of any class
        return f"{type(e).__name__}: {_line(e)}"
    return ""


# -- all of them -------------------------------------------------------------------------------------------------------
def families(args: argparse.Namespace) -> dict[str, Any]:
    """Tries these families, or all; says a line for each, and at the end a table. Raises ArgumentError."""
    at_least(args, "jobs", 1)
    known = known_families()
    if unknown := [name for name in args.names if name not in known]:
        reason = f"{unknown[0]} is no family with a loss that the lab trains"
        raise ArgumentError("FAMILY", reason, f"give some of {', '.join(known)}")
    pending, found = deque(args.names or known), dict[str, Any]()

    def work() -> None:
        pool = Pool(2)
        while pending:
            name = pending.popleft()
            found[name] = outcome = _outcome(pool, name)
            told = f"{outcome['group']}{': ' if outcome['reason'] else ''}{outcome['reason']}"
            say(f"{name:30} {outcome['parameters'] / 1e6:5.2f}M {outcome['seconds']:5.1f} s  {told}")
            if outcome["group"] != TRAINS:
                pool.renew()  # nothing of it is left for the next
        pool.close()

    with ThreadPoolExecutor(args.jobs) as threads:
        try:
            for worker in [threads.submit(work) for _ in range(args.jobs)]:
                worker.result()
        finally:
            pending.clear()  # after Ctrl-C the executor waits for the families that are tried
    say(table(found))
    return {"environment": {"limit_s": LIMIT_S}, "families": dict(sorted(found.items()))}


def _outcome(pool: Pool, name: str) -> dict[str, Any]:
    begun_s = time.monotonic()
    folder = tempfile.mkdtemp(prefix="fsdp-lab-families-")
    try:
        told = pool.run(_tried, 2, name, folder, reduction=None, timeout_s=LIMIT_S)
    except RankError as e:
        inside = str(e).partition("Current thread")[2].splitlines()[1:5]  # where a rank is that did not answer
        lines = [str(e).splitlines()[0], *map(str.strip, inside)]
        told = [{"parameters": 0, "runs": {"lab": f"{FAILED}: {' < '.join(lines)}"}}]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    runs = {run: _together(run, [rank["runs"].get(run, "") for rank in told]) for run in told[0]["runs"]}
    group, reason = _verdict(runs, told[0].get("alone", ""))
    return {**told[0], "runs": runs, "group": group, "reason": reason, "seconds": time.monotonic() - begun_s}


def _together(run: str, told: list[Any]) -> Any:
    """What all ranks told of a run: its numbers, or the text of the rank where it began."""
    if texts := [t for t in told if isinstance(t, str)]:
        return min(texts, key=lambda t: "RankAborted" in t)
    *losses, checksum = told[0]
    parts = [checksum] if run == "ddp" else [rank[-1] for rank in told]
    return [*losses, sum(parts) % (1 << 64)]


def _verdict(runs: Mapping[str, Any], alone: str) -> tuple[str, str]:
    """The group of a family, and why; with the backends that refuse one that trains."""
    if isinstance(runs["lab"], str):
        group, _, reason = runs["lab"].partition(": ")
        return (NO_CONFIG, alone) if alone else (group, reason)
    texts = {run: told for run, told in runs.items() if isinstance(told, str)}
    faults = [f"{run}: {told}" for run, told in texts.items() if not told.startswith(REFUSED)]
    for run, told in runs.items():
        if not isinstance(told, str) and not _same(run, told, runs["lab"]):
            pairs = zip(told, runs["lab"], strict=True)
            faults.append(f"{run} differs: {next(f'{a} for {b}' for a, b in pairs if a != b)}")
    if faults:
        return FAILED, "; ".join(faults)
    return TRAINS, "; ".join(f"{run} {told}" for run, told in texts.items())


def _same(run: str, told: Sequence[float], want: Sequence[float]) -> bool:
    if run not in LOOSE:
        return told == want
    return all(abs(a - b) <= RELATIVE * abs(b) for a, b in zip(told[:-1], want[:-1], strict=True))


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """The families of each group by reason, without the names in a reason, in which they differ."""
    kinds = (TRAINS, REFUSED, NO_CONFIG, FAILED)
    groups: dict[str, dict[str, list[str]]] = {kind: defaultdict(list) for kind in kinds}
    for name, outcome in sorted(found.items()):
        reason = re.sub(r"(workload|strategy)\.\w+: ", "", outcome["reason"])
        reason = re.sub(rf"\b[a-z_]\w*(\.\w+)+\b|\b{re.escape(name)}\b", "...", reason)
        groups[outcome["group"]][textwrap.shorten(reason, 300)].append(name)
    wrap = partial(textwrap.wrap, width=120, break_on_hyphens=False)
    lines = []
    for group, reasons in groups.items():
        lines.append(f"\n{group}: {sum(map(len, reasons.values()))} of {len(found)}")
        for reason, names in sorted(reasons.items(), key=lambda item: -len(item[1])):
            lines += wrap(f"{reason or 'under every backend'}:", initial_indent="  ", subsequent_indent="  ")
            lines += wrap(", ".join(names), initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)
