import sys; sys.path.insert(0, "scratch")
import lab, wrap
from rollkv.cuda.kernels import linear_rows as L
from rollkv.cuda.backend import CudaBackend
from rollkv.backend import Stream
import numpy as np, time
from concurrent.futures import ThreadPoolExecutor
import re
wrap.install()
TYPES = sys.argv[1].split(",")
VARS = [("g2 b2", dict(groups=2, batch=2), {}), ("g2 b1", dict(groups=2, batch=1), dict(BATCH=1)), ("g1 b2", dict(groups=1, batch=2), {}), ("g1 b1", dict(groups=1, batch=1), dict(BATCH=1)),
        ("g1 b2 bps2", dict(groups=1, batch=2, bps=2), {}), ("g1 b2 bps2 56K", dict(groups=1, batch=2, bps=2, limit=56 << 10), {"RESIDENT(T,G)": 4}),
        ("g1 b1 70K", dict(groups=1, batch=1, limit=70 << 10), dict(BATCH=1)), ("g2 b1 70K", dict(groups=2, batch=1, limit=70 << 10), dict(BATCH=1)), ("g2 b1 1/SM 227K", dict(groups=2, batch=1, limit=226 << 10, maxdepth=8), {"BATCH": 1, "RESIDENT(T,G)": 1})]
BASE = dict(wrap.CFG)
with CudaBackend(0) as b:
    lb = lab.Lab(b); las = {}; t0 = time.time(); jobs = []
    for n, c, d in VARS:
        las[n] = lb.launcher(n, d); wrap.CFG.update(BASE); wrap.CFG.update(c); L.launch_shape.cache_clear()
        for q in TYPES:
          try:
            for s in {L.spec(q, 1, L.launch_shape(q, 1, *sh, 132).depth) for sh in lab.SHAPES.values()}: jobs.append((n, s))
          except ValueError as e: print(n, e)
    with ThreadPoolExecutor(16) as ex:
        cub = list(ex.map(lambda a: las[a[0]]._cache.get(a[1].source, (a[1].expression,), b.launcher.arch), jobs))
    regs = {(n, s.expression): re.findall(r"Used (\d+) reg", c.log)[0] + ("" if " 0 bytes spill stores" in c.log else "S") for (n, s), c in zip(jobs, cub)}
    print(f"compile {time.time()-t0:.1f} s", flush=True)
    for q in TYPES:
        total = sum(lab.device_bytes(q, s) for s in lab.SHAPES.values())
        print(q, f"layer at 4300: {total/4300e3:.1f} us")
        for n, c, d in VARS:
            wrap.CFG.update(BASE); wrap.CFG.update(c); L.launch_shape.cache_clear(); la = las[n]; cells = []
            try:
                for sn, s in lab.SHAPES.items():
                    sh = L.launch_shape(q, 1, *s, 132); us = lb.one(la, q, s)
                    cells.append(f"{us:5.1f} {lab.device_bytes(q, s)/us/43e3:3.0f}% d{sh.depth} r{regs[(n, L.spec(q, 1, sh.depth).expression)]:3}")
                h = lb.one(la, q, lab.SHAPES["o"], hot=True); ly = lb.layer(la, q)
                print(f"{n:16} " + " ".join(cells) + f" hot {h:5.1f} layer {ly:6.1f} {total/ly/43e3:4.0f}%", flush=True)
            except Exception as e:
                print(n, "FAILED", str(e)[:300], flush=True)
    if len(sys.argv) > 2:
      for G in (2, 1):
        la = lb.launcher(f"stamp{G}", dict(BATCH=1, STAMP=1)); wrap.CFG.update(BASE); wrap.CFG.update(dict(groups=G, batch=1)); L.launch_shape.cache_clear()
        for q in TYPES:
            for sn in ("o", "gu"):
                s = lab.SHAPES[sn]
                print("G", G, q, sn, "us", lb.one(la, q, s))
                sp = L.spec(q, 1, L.launch_shape(q, 1, *s, 132).depth)
                mod = la._modules[-1]
                ptr, size = b._calls("cuModuleGetGlobal", mod, b"stamps")
                out = np.zeros(2048, np.uint64); b.synchronize()
                b._calls("cuMemcpyDtoH", out.ctypes.data, ptr, out.nbytes)
                st = out.reshape(256, 8)[:132, :6].astype(np.int64); st -= st[:, 2].min()
                print("  start, issued, waited, staged, multiplied(last), end: min", st.min(0), "median", np.median(st, 0), "max", st.max(0), flush=True)
