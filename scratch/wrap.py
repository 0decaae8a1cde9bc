"""Patches rollkv.cuda.kernels.linear_rows for the new kernel (experiment)."""
from functools import cache
from rollkv.cuda.kernels import linear_rows as L
from rollkv.cuda.nvrtc import KernelSpec
from rollkv.quants import FORMATS, TILE_ROWS, span_bytes
CFG = dict(groups=2, limit=113 << 10, batch=2, maxdepth=16, threads=None, bps=1)
BYTES = {q for q, f in FORMATS.items() if f.metas}
SUM_GROUP = {"Q4_1": 32, "Q5_1": 32, "Q4_K": 32, "Q5_K": 32, "Q2_K": 16}
def shape(qtype, num_rows, outputs, columns, num_sms):
    rows = next(r for r in (1, 2, 4, 8, 16) if r >= num_rows)
    fmt = FORMATS[qtype]; span = fmt.span
    groups = 1 if rows == 16 else CFG["groups"]
    batch = CFG["batch"] if span == 64 and qtype in BYTES else 1
    slot = batch * sum(span_bytes(fmt, f) for f in fmt.fields) * 8 * groups
    static = ((2 if rows == 1 else 1) * groups * 8 * rows * 16 + groups * rows + 16 + groups * rows * 16) * 4
    staged = -(-columns // span) * span
    if rows > 1: staged = min(staged, {2: 8192, 4: 4096, 8: 2048, 16: 1024}[rows] // (1 if qtype in BYTES else 2))
    limit = CFG["limit"] if rows == 1 else 99 << 10
    def xbytes(staged):
        n = 3 * rows * (staged * (1 if qtype in BYTES else 2) + 32)
        if qtype not in ("BF16", "F32"): n += -(-staged // 256) * rows * 4
        if qtype in SUM_GROUP: n += staged // SUM_GROUP[qtype] * rows * 4
        return n
    if CFG.get('regs'):
        return L.Shape(rows, CFG['regs'][qtype], staged, xbytes(staged), min(-(-outputs // TILE_ROWS), num_sms * CFG['bps'])), groups
    while True:
        depth = min(CFG["maxdepth"], (limit - static - 64 - 1024 - xbytes(staged)) // slot)
        if depth >= 2: break
        if rows == 1 and staged <= 4096: raise ValueError(f"{qtype} does not fit")
        staged = (staged - 1) // 4096 * 4096 if rows == 1 else staged // 2
        if staged == 0: raise ValueError(f"{qtype} does not fit")
    return L.Shape(rows, depth, staged, depth * slot + xbytes(staged), min(-(-outputs // TILE_ROWS), num_sms * CFG["bps"])), groups
SHAPES = cache(shape)
def spec(qtype, rows, depth):
    groups = 1 if rows == 16 else CFG["groups"]
    return KernelSpec("linear_rows.cu", f"linear_rows<{qtype}, {rows}, {groups}, {depth}>", early=True)
_spec = cache(lambda q, r, d, g: KernelSpec("linear_rows.cu", f"linear_rows<{q}, {r}, {g}, {d}>", early=True))
def install():
    L.launch_shape = lambda *a: SHAPES(*a)[0]
    L.launch_shape.cache_clear = lambda: SHAPES.cache_clear()
    L.spec = lambda q, r, d: _spec(q, r, d, 1 if r == 16 else CFG["groups"])
    import rollkv.cuda.kernels.linear_rows as M
    import types
    src = __import__("inspect").getsource(L._launch).replace("WARPS * 32,", "WARPS * 32 * (1 if shape.rows == 16 else CFG['groups']),")
    ns = L.__dict__; ns["CFG"] = CFG
    exec(src, ns)
