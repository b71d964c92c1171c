"""Subgraphs that kernels of both languages compute: their patterns, and what a region of them has and lacks.

Kernel folders do not import from each other; what a fusion is, is no matter of the language. Which fusions exist and at
what shapes stays with the menus.
"""
from __future__ import annotations

from .kernel import Region

_KDA = """
raw = linear(f_a, f_b)
q_act, k_act, v_act, window_next = kda_conv(q, k, v, window, weight_q, weight_k, weight_v, slots, positions{after})
decay = kda_gate(raw, a_log, dt_bias)
o, state_next{record} = {rule}
y = gated_rms_norm(o, gate, norm)
-> y, window_next, state_next{record}
"""
KDA_DECODE = _KDA.format(
    after="", record="", rule="kda_delta_rule(q_act, k_act, v_act, decay, beta, state, slots, positions)")
KDA_VERIFY = _KDA.format(
    after=", accepted", record=", record_next",
    rule="kda_verify(q_act, k_act, v_act, decay, beta, state, record, slots, positions, accepted)")
KDA_VERIFY_SLOTS = _KDA.format(
    after=", accepted", record="",
    rule="kda_verify_slots(q_act, k_act, v_act, decay, beta, state, slots, positions, accepted)")

PROJECTION = "f = linear(x, weight)\n-> f"
PROJECTION_ADD = "f = linear(x, weight)\ny = add(f, other)\n-> y"
PROJECTION_GATE = "f = linear(x, weight)\ny = sigmoid_mul(gated, f)\n-> y"
PROJECTION_ROUTER = "logits = linear(x, router)\nf = linear(x, weight)\n-> logits, f"

MIX = "m = attn_res(score, p, ...)\nh = rms_norm(m, weight)\n-> p, h"
ADD_MIX = f"? p = residual_add(prefix, delta)\n{MIX}"
STRIPE = "n = rms_norm(latent, norm)\nup = linear(n, weight)\nout = add(up, shared)\ng = all_gather(out)"
MOE_EXPERTS = """\
gate, up = experts_gate_up(x, ids, rank, w1, w3, s1, s3)
act = situ_and_mul(gate, up)
pairs = experts_down(act, ids, rank, w2, s2)
out = experts_combine(pairs, weights)"""
_SUMS = "latent = all_reduce(x)\nshared = reduce_scatter(other)"
MOE_TAIL = f"{_SUMS}\n{STRIPE}\n-> g"
# the tail and the mix before the next layer, whose norm has a weight of its own
MOE_TAIL_ADD_MIX = f"""
{_SUMS}
n = rms_norm(latent, norm)
up = linear(n, up_weight)
out = add(up, shared)
g = all_gather(out)
p = residual_add(prefix, g)
{MIX}
"""
# all of a sparse layer behind its router, and with the mix before the next layer
_SPARSE = """
gate, up = experts_gate_up(x, ids, rank, w1, w3, s1, s3)
act = situ_and_mul(gate, up)
pairs = experts_down(act, ids, rank, w2, s2)
routed = experts_combine(pairs, weights)
s = linear(a, w)
latent = all_reduce(routed)
shared = reduce_scatter(s)
n = rms_norm(latent, norm)
lifted = linear(n, up_weight)
out = add(lifted, shared)
g = all_gather(out)
"""
MOE_EXPERTS_TAIL = f"{_SPARSE}-> g"
MOE_EXPERTS_TAIL_ADD_MIX = f"{_SPARSE}p = residual_add(prefix, g)\n{MIX}"

MOE_FRONT_SHARDED = """
logits = linear(x, router)
f = linear(x, weight)
gate = slice(f)
up = slice(f)
a = situ_and_mul(gate, up)
part = slice(f)
every = all_gather(logits)
ids, weights = router_topk(every, bias)
latent = all_gather(part)
-> a, ids, weights, latent
"""


def activated_projection(activation: str, *, router: bool) -> str:
    """Pattern of a projection whose last rows are gate and up; with the router's rows where ``router``."""
    lines = ["logits = linear(x, router)"] if router else []
    lines += ["f = linear(x, weight)", "gate = slice(f)", "up = slice(f)", f"a = {activation}(gate, up)"]
    return "\n".join([*lines, "-> logits, f, a" if router else "-> f, a"])


def row_groups(region: Region) -> tuple[int, int, int]:
    """Output rows of a projection: (router, plain, pairs of gate and up)."""
    router = region.value("router").shape[0] if "router" in region.binding else 0
    total = region.value("weight").shape[0]
    pairs = region.value("a").shape[-1] if "a" in region.binding else 0
    return router, total - 2 * pairs, pairs


def refuse_dtypes(region: Region) -> str | None:
    """Rows and weights of a projection must be bf16, and the rows a matrix."""
    for name in ("x", "weight", "router"):
        if name in region.binding and region.value(name).dtype != "bf16":
            return f"{name} is {region.value(name).dtype}, the kernel reads bf16"
    if len(region.value("x").shape) != 2:
        return "rows must be a matrix"
    return None


def refuse_pairs(region: Region) -> str | None:
    """Gate and up, where the pattern has them, must be the last rows of the projection, side by side."""
    if "a" not in region.binding:
        return None
    views = [region.maker(name) for name in ("gate", "up")]
    (start, middle), (again, end) = ((v.attrs["start"], v.attrs["stop"]) for v in views if v is not None)
    if again != middle or middle - start != end - middle or end != region.value("weight").shape[0]:
        return "gate and up are not the last rows of one projection"
    return None


def refuse_router(region: Region) -> str | None:
    """Logits must be fp32 and the rows beside them bf16; gate and up as in ``refuse_pairs``."""
    out = region.value("logits").dtype
    if out != "fp32" or region.value("f").dtype != "bf16":
        return f"the two projections give {out} and {region.value('f').dtype}, not fp32 and bf16"
    return refuse_pairs(region)
