"""Right or wrong: every type against float64, with wrap's shapes."""
import sys; sys.path[:0] = ["scratch", "tests/kernels"]
import numpy as np, wrap
from rollkv.cuda.kernels import linear_rows as L
from rollkv.cuda.backend import CudaBackend
from rollkv.quants import FORMATS
from oracle_linear import allowed_error, load_weight, product, random_weight, values
from concurrent.futures import ThreadPoolExecutor
wrap.install()
def run(b, groups, types, rowss):
    wrap.CFG["groups"] = groups; L.launch_shape.cache_clear()
    specs = set()
    for q in types:
        for r in rowss:
            for K in (3 * FORMATS[q].span, 4096, 11008 // FORMATS[q].elements * FORMATS[q].elements):
                try: specs.add(L.spec(q, next(i for i in (1,2,4,8,16) if i >= r), L.launch_shape(q, r, 203, K, 132).depth))
                except ValueError: pass
    b.launcher.prepare(list(specs))
    rng = np.random.default_rng(1)
    for q in types:
        out = []
        for N, K in ((37, 3 * FORMATS[q].span), (203, 11008), (1040, 4096)):
            t = random_weight(q, (N, K), rng); w = load_weight(b, t); tab = values(t)
            x = (rng.standard_normal((16, K)) + 0.3).astype(np.float32); bias = rng.standard_normal(N).astype(np.float32)
            lim, ex = allowed_error(x, tab, bias), product(x, tab, bias); db = b.upload("bias", bias); full = None
            for r in rowss:
                y = b.upload("y", np.full((r, N), np.nan, np.float32))
                try: L.linear_rows(b.launcher, b.upload("x", x[:r]), w, y, num_sms=132, bias=db)
                except ValueError: out.append("-"); continue
                f = b.read(y); full = f if full is None else full
                e = np.abs(f - ex[:r]).max() / lim
                out.append(f"{e:.2f}" + ("" if np.array_equal(f.view(np.uint32), full[:r].view(np.uint32)) else "BITS"))
        print("groups", groups, q, " ".join(out), flush=True)
with CudaBackend(0) as b:
    b.reserve_linear(16, 12288, 4096, 64 << 20)
    run(b, 1, list(FORMATS), (16, 8, 3, 2, 1))
    run(b, 2, ["Q8_0", "Q4_K", "F16"], (1,))
