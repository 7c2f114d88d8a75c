"""Whether our kernels serve a graph: one ordered table of rules, and the first that hits declines with its reason.

A rule may rely on all rules before it. Rules of features that are not served come from support.py; the others say what
every graph must have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .config.arch import TMA_MAX_STRIDE
from .config.padding import QUERY_PADDING
from .config.tiles import HEADDIM_MULTIPLE, MAX_HEADDIM, configs_for
from .facts import ITEMSIZE, MISSING, BwdFacts, TensorFacts
from .knobs import BwdKnobs
from .support import (
    DTYPES,
    FEATURES,
    LENGTH_DTYPE,
    MAX_BIAS_ROW_STRIDE,
    MAX_HEAD_ELEMENTS,
    MAX_SEQLEN,
    SCALE_DTYPE,
    SINK_DTYPE,
    STATS_DTYPE,
    STRIDE_MULTIPLE,
    TARGETS,
    Feature,
)
from .target import Target

FP32_MAX = float.fromhex("0x1.fffffep+127")
_AXES = ("batch", "head", "sequence", "head dim")


@dataclass(frozen=True)
class Rule:
    """``predicate`` is True where the graph must be declined; ``reason`` then says so in one sentence, and ``change``
    what to do about it."""

    name: str
    predicate: Callable[[BwdFacts, Target], bool]
    reason: Callable[[BwdFacts, Target], str]
    change: str

    def says(self, facts: BwdFacts, target: Target) -> str:
        """The reason with the rule's name."""
        return f"{self.reason(facts, target)} [{self.name}]"


def declining_rule(facts: BwdFacts, target: Target) -> Rule | None:
    """The first rule that declines ``facts`` on ``target``, or None where it is served."""
    return next((rule for rule in RULES if rule.predicate(facts, target)), None)


def decline_reason(facts: BwdFacts, target: Target, knobs: BwdKnobs | None = None) -> str | None:
    """Why ``facts`` is not served on ``target`` (with ``knobs``, if given), or None where it is."""
    rule = declining_rule(facts, target)
    if rule is not None:
        return rule.says(facts, target)
    return _knobs_reason(facts, target, knobs) if knobs is not None else None


def _knobs_reason(facts: BwdFacts, target: Target, knobs: BwdKnobs) -> str | None:
    """A way to sum dQ has to be offered here; of tiles and heads, any that a kernel has are served, offered or not,
    since a record may come from a GPU that ranks otherwise."""
    from .heuristics import offered_modes, ranked_knobs
    from .plan import make_plan

    if knobs.reduction_mode not in offered_modes(facts, target):
        offered = "; ".join(map(str, ranked_knobs(facts, target)))
        return f"knobs {knobs} are not offered for this graph; it has {offered} [knobs]"
    try:
        make_plan(facts, knobs, target)
    except NotImplementedError as error:
        return f"{error} [knobs]"
    return None


def _operands(facts: BwdFacts) -> tuple[TensorFacts, ...]:
    return (*facts.io(), facts.stats)


def _names(tensors: Iterable[TensorFacts]) -> str:
    return ", ".join(tensor.name for tensor in tensors)


# Every helper below returns what is wrong, or an empty value; ``_fault`` turns that into the two halves of a rule.


def _misshapen(facts: BwdFacts) -> str:
    b, hq, sq, dqk = facts.q.dim
    _, hk, sk, _ = facts.k.dim
    hv, dv = facts.v.dim[1], facts.v.dim[3]
    wanted = {
        "k": (b, hk, sk, dqk),
        "v": (b, hv, sk, dv),
        "o": (b, hq, sq, dv),
        "do": (b, hq, sq, dv),
        "stats": (b, hq, sq, 1),
        "dq": facts.q.dim,
        "dk": facts.k.dim,
        "dv": facts.v.dim,
    }
    for tensor in _operands(facts):
        if tensor.name in wanted and tensor.dim != wanted[tensor.name]:
            return f"{tensor.name} has dims {tensor.dim} where q, k and v imply {wanted[tensor.name]}"
        if min(tensor.dim) < 1:
            return f"{tensor.name} has dims {tensor.dim}, and every dim must be at least 1"
    return ""


def _steps(tensor: TensorFacts) -> list[tuple[int, int, str]]:
    """(stride, extent, axis name) of the dims that are stepped; the strides of size-1 dims mean nothing."""
    axes = zip(tensor.stride, tensor.dim, _AXES, strict=True)
    return [(stride, extent, axis) for stride, extent, axis in axes if extent > 1]


def _not_contiguous(facts: BwdFacts) -> str:
    bad = [tensor for tensor in facts.io() if tensor.stride[3] != 1]
    return _names(bad)


def _broadcast(facts: BwdFacts) -> str:
    for tensor in _operands(facts):
        for stride, extent, axis in _steps(tensor):
            if stride < 1:
                return f"{tensor.name} has stride {stride} on its {axis} of size {extent}"
    return ""


def _odd_stride(facts: BwdFacts) -> str:
    for tensor in facts.io():
        for stride, _, axis in _steps(tensor)[:-1]:
            if stride % STRIDE_MULTIPLE:
                return f"the {axis} stride of {tensor.name} is {stride}"
    return ""


def _huge_stride(facts: BwdFacts) -> str:
    for tensor in facts.io():
        for stride, _, axis in _steps(tensor):
            if stride * ITEMSIZE[tensor.dtype] >= TMA_MAX_STRIDE:
                return f"the {axis} stride of {tensor.name} is {stride}"
    return ""


def _overlapping(facts: BwdFacts) -> str:
    for tensor in facts.outputs():
        reach = 0
        for stride, extent in sorted(
            (stride, extent) for stride, extent in zip(tensor.stride, tensor.dim, strict=True) if extent > 1
        ):
            if stride <= reach:
                return f"{tensor.name} with dims {tensor.dim} and strides {tensor.stride} has elements on one address"
            reach += stride * (extent - 1)
    return ""


def _bad_bound(facts: BwdFacts) -> str:
    if facts.mask.left_bound is not None and facts.mask.left_bound < 1:
        return f"the left bound is {facts.mask.left_bound}, and must be at least 1"
    if facts.mask.right_bound is not None and facts.mask.right_bound < 0:
        return f"the right bound is {facts.mask.right_bound}, and must be at least 0"
    return ""


def _bad_lengths(facts: BwdFacts) -> str:
    lengths = {"seq_len_q": facts.seq_len_q, "seq_len_kv": facts.seq_len_kv}
    given = {name: tensor for name, tensor in lengths.items() if tensor is not None}
    if facts.mask.padding and len(given) < 2:
        return "use_padding_mask needs both seq_len_q and seq_len_kv"
    if given and not facts.mask.padding:
        return f"{' and '.join(given)} without use_padding_mask would mask nothing"
    for name, tensor in given.items():
        if tensor.dtype != LENGTH_DTYPE:
            return f"{name} is {tensor.dtype}, and must be {LENGTH_DTYPE}"
        if tensor.dim not in ((facts.batch,), (facts.batch, 1, 1, 1)):
            return f"{name} has dims {tensor.dim} where the batch implies {(facts.batch, 1, 1, 1)}"
        if facts.batch > 1 and tensor.stride[0] != 1:
            return f"{name} has stride {tensor.stride[0]}, and must be contiguous"
        if tensor.by_value:
            return f"{name} lies in host memory, and must be on the device"
    return ""


def _bad_bias(facts: BwdFacts) -> str:
    if facts.dbias is not None and facts.bias is None:
        return "dBias needs a bias"
    scores = (facts.batch, facts.heads_q, facts.seqlen_q, facts.seqlen_k)
    for tensor in (facts.bias, facts.dbias):
        if tensor is None:
            continue
        if len(tensor.dim) != 4 or any(have not in (1, full) for have, full in zip(tensor.dim, scores, strict=True)):
            return f"{tensor.name} has dims {tensor.dim}, and each must be 1 or that of the scores, {scores}"
        if tensor.dtype not in ("fp32", facts.dtype):
            return f"{tensor.name} is {tensor.dtype}, and must be fp32 or {facts.dtype}"
        if tensor.by_value:
            return f"{tensor.name} lies in host memory, and must be on the device"
        if min(stride for stride, _, _ in [*_steps(tensor), (0, 0, "")]) < 0:
            return f"{tensor.name} has a negative stride"
        if tensor.dim[2] > 1 and tensor.stride[2] > MAX_BIAS_ROW_STRIDE:
            return f"the sequence stride of {tensor.name} is {tensor.stride[2]}, above {MAX_BIAS_ROW_STRIDE}"
    if facts.dbias is not None and facts.bias is not None and facts.dbias.dim != facts.bias.dim:
        return f"dBias has dims {facts.dbias.dim}, and must have those of the bias, {facts.bias.dim}"
    return ""


def _bad_sink(facts: BwdFacts) -> str:
    if facts.dsink is not None and facts.sink is None:
        return "dSink_token needs a sink_token"
    wanted = (1, facts.heads_q, 1, 1)
    for tensor in (facts.sink, facts.dsink):
        if tensor is None:
            continue
        if tensor.dim != wanted or (facts.heads_q > 1 and tensor.stride[1] != 1):
            return f"{tensor.name} has dims {tensor.dim} and strides {tensor.stride}, and must be a contiguous {wanted}"
        if tensor.dtype != SINK_DTYPE or tensor.by_value:
            return f"{tensor.name} must be {SINK_DTYPE} on the device"
    return ""


def _bad_scale_tensor(facts: BwdFacts) -> str:
    scale = facts.scale_tensor
    if scale is None:
        return ""
    if scale.dtype != SCALE_DTYPE or any(extent != 1 for extent in scale.dim):
        return f"the attn_scale tensor is {scale.dtype} with dims {scale.dim}, and must be one {SCALE_DTYPE} value"
    return ""


def _too_long(facts: BwdFacts) -> str:
    if max(facts.seqlen_q, facts.seqlen_k) > MAX_SEQLEN:
        return f"S_q={facts.seqlen_q}, S_k={facts.seqlen_k}, and lengths up to {MAX_SEQLEN} are served"
    (native, *_) = configs_for(facts.headdim_qk, facts.headdim_v)
    longest = MAX_HEAD_ELEMENTS // native.headdim_qk - QUERY_PADDING
    if facts.seqlen_q > longest:
        return f"S_q={facts.seqlen_q}, and up to {longest} query rows are served at d_qk={facts.headdim_qk}"
    return ""


def _odd_headdim(facts: BwdFacts) -> bool:
    return bool(facts.headdim_qk % HEADDIM_MULTIPLE or facts.headdim_v % HEADDIM_MULTIPLE)


def _heads_of(facts: BwdFacts) -> str:
    return f"H_q={facts.heads_q}, H_k={facts.heads_k}, H_v={facts.heads_v}"


def _headdims_of(facts: BwdFacts) -> str:
    return f"d_qk={facts.headdim_qk}, d_v={facts.headdim_v}"


def _not_served(feature: Feature) -> Rule:
    return Rule(
        feature.name,
        lambda facts, target: feature.asked(facts),
        lambda facts, target: f"the graph asks for {feature.title}, which this engine does not serve",
        f"leave out {feature.title}",
    )


def _fault(name: str, find: Callable[[BwdFacts], str], rule: str, change: str) -> Rule:
    """Declines where ``find`` finds something wrong; the reason is that and, if it does not say so itself, the rule."""
    return Rule(name, lambda facts, target: bool(find(facts)), lambda facts, target: find(facts) + rule, change)


RULES: tuple[Rule, ...] = (
    Rule(
        "target",
        lambda f, t: t.name not in TARGETS,
        lambda f, t: f"the target is {t.name}, and this engine serves {', '.join(TARGETS)}",
        "plan for an SM120 or SM121 GPU",
    ),
    Rule(
        "kind",
        lambda f, t: f.kind != "sdpa_backward",
        lambda f, t: f"this is an {f.kind} graph, and this engine serves sdpa_backward in {' and '.join(DTYPES)}",
        "use sdpa_backward with fp16 or bf16 tensors",
    ),
    Rule(
        "single_node",
        lambda f, t: bool(f.other_nodes),
        lambda f, t: f"the graph has {', '.join(f.other_nodes)} beside sdpa_backward, which is served alone",
        "put sdpa_backward into a graph of its own",
    ),
    Rule(
        "unknown",
        lambda f, t: bool(f.unknown),
        lambda f, t: f"the graph sets {', '.join(f.unknown)}, which this version does not know",
        "leave the named ports and attributes out, or update cudnn_frost_sm120",
    ),
    Rule(
        "operands",
        lambda f, t: any(tensor.dtype == MISSING for tensor in _operands(f)),
        lambda f, t: f"the graph has no {_names(x for x in _operands(f) if x.dtype == MISSING)}",
        "give the graph q, k, v, o, dO and stats, and set dQ, dK and dV as outputs",
    ),
    Rule(
        "rank",
        lambda f, t: any(len(tensor.dim) != 4 or len(tensor.stride) != 4 for tensor in _operands(f)),
        lambda f, t: f"{_names(x for x in _operands(f) if len(x.dim) != 4 or len(x.stride) != 4)} must have 4 dims",
        "declare every tensor as (B, H, S, D)",
    ),
    _fault("shapes", _misshapen, "", "give all tensors the sizes that q, k and v imply"),
    *(_not_served(feature) for feature in FEATURES if not feature.served),
    Rule(
        "dtype",
        lambda f, t: f.dtype not in DTYPES,
        lambda f, t: f"q is {f.dtype}, and this engine serves {' and '.join(DTYPES)}",
        "use fp16 or bf16",
    ),
    Rule(
        "uniform_dtype",
        lambda f, t: any(tensor.dtype != f.dtype for tensor in f.io()),
        lambda f, t: f"{_names(x for x in f.io() if x.dtype != f.dtype)} must be {f.dtype}, as q is",
        "give q, k, v, o, dO, dQ, dK and dV one dtype",
    ),
    Rule(
        "stats_dtype",
        lambda f, t: f.stats.dtype != STATS_DTYPE,
        lambda f, t: f"stats is {f.stats.dtype}, and must be {STATS_DTYPE}",
        "pass stats in fp32",
    ),
    Rule(
        "heads",
        lambda f, t: f.heads_q % f.heads_k != 0 or f.heads_k != f.heads_v,
        lambda f, t: f"{_heads_of(f)}, and H_q must be a multiple of H_k, which must equal H_v",
        "make H_q a multiple of H_k, and H_v equal to H_k",
    ),
    Rule(
        "headdim_multiple",
        lambda f, t: _odd_headdim(f),
        lambda f, t: f"{_headdims_of(f)}, and head dims must be multiples of {HEADDIM_MULTIPLE}",
        "pad head dims to a multiple of 8",
    ),
    Rule(
        "headdim_max",
        lambda f, t: not configs_for(f.headdim_qk, f.headdim_v),
        lambda f, t: f"{_headdims_of(f)}, and head dims up to {MAX_HEADDIM} are served",
        "use head dims up to 256",
    ),
    _fault("length_max", _too_long, "", "split the sequence"),
    _fault(
        "headdim_contiguous",
        _not_contiguous,
        " must have stride 1 on the head dim",
        "lay tensors out with the head dim innermost",
    ),
    _fault("broadcast", _broadcast, ", and must not be expanded or reversed", "copy expanded or reversed tensors"),
    _fault(
        "stride_multiple",
        _odd_stride,
        f", and must be a multiple of {STRIDE_MULTIPLE} elements (16 bytes)",
        "align rows to 16 bytes",
    ),
    _fault(
        "stride_max",
        _huge_stride,
        f", and must be below {TMA_MAX_STRIDE} bytes",
        "copy the tensor into a denser layout",
    ),
    Rule(
        "virtual",
        lambda f, t: any(x.virtual for x in (*f.inputs(), *f.outputs())),
        lambda f, t: f"{_names(x for x in (*f.inputs(), *f.outputs()) if x.virtual)} must be set_output(True)",
        "call set_output(True) on the gradients",
    ),
    _fault("overlap", _overlapping, "", "give every element of an output an address of its own"),
    _fault("mask_bounds", _bad_bound, "", "use a left bound of at least 1, a right bound of at least 0"),
    _fault(
        "lengths",
        _bad_lengths,
        "",
        "pass both lengths, contiguous int32 of (B, 1, 1, 1) on the device, with use_padding_mask",
    ),
    _fault(
        "bias_shape",
        _bad_bias,
        "",
        "give bias and dBias dims that are 1 or those of the scores, in fp32 or the io dtype",
    ),
    _fault("scale_tensor_shape", _bad_scale_tensor, "", "pass attn_scale as a number, or as one fp32 value"),
    _fault("sink_shape", _bad_sink, "", "pass sink tokens as contiguous fp32 of (1, H_q, 1, 1)"),
    Rule(
        "scale",
        lambda f, t: f.scale is not None and not abs(f.scale) <= FP32_MAX,
        lambda f, t: f"attn_scale is {f.scale}, and must be a finite fp32 value",
        "pass a finite attn_scale",
    ),
)
"""In order; a name appears once."""
