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
B1 = dict(BATCH=1)
RG = dict(groups=1, batch=1, bps=2, regs={"Q8_0": 8, "Q4_K": 2})


G2 = dict(groups=2, batch=1)
R = B1 | dict(REGS=1)
R = B1 | dict(REGS=1)
D1 = {"Q8_0": 8, "Q4_K": 2, "Q6_K": 2, "Q4_0": 8, "F16": 4}; D2 = {"Q8_0": 7, "Q4_K": 3, "Q6_K": 1, "Q4_0": 12, "F16": 3}
VARS = [("regs", RG | dict(regs=D1), R), ("regs other d", RG | dict(regs=D2), R), ("regs bps1", RG | dict(regs=D1, bps=1), R), ("regs bps1 other d", RG | dict(regs=D2, bps=1), R), ("regs warm", RG | dict(regs=D1), R | dict(WARM=1))]
BASE = dict(wrap.CFG)
with CudaBackend(0) as b:
    lb = lab.Lab(b); las = {}; t0 = time.time(); jobs = []
    for n, c, d in VARS:
        las[n] = lb.launcher(n, d, carve=False); wrap.CFG.pop("regs", None); wrap.CFG.update(BASE); wrap.CFG.update(c); L.launch_shape.cache_clear()
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
            wrap.CFG.pop("regs", None); wrap.CFG.update(BASE); wrap.CFG.update(c); L.launch_shape.cache_clear(); la = las[n]; cells = []
            try:
                for sn, s in lab.SHAPES.items():
                    sh = L.launch_shape(q, 1, *s, 132); us = lb.one(la, q, s)
                    cells.append(f"{us:5.1f} {lab.device_bytes(q, s)/us/43e3:3.0f}% d{sh.depth} r{regs[(n, L.spec(q, 1, sh.depth).expression)]:3}")
                h = lb.one(la, q, lab.SHAPES["o"], hot=True); ly = lb.layer(la, q)
                print(f"{n:16} " + " ".join(cells) + f" hot {h:5.1f} layer {ly:6.1f} {total/ly/43e3:4.0f}%", flush=True)
            except Exception as e:
                print(n, "FAILED", str(e)[:300], flush=True)
    if len(sys.argv) > 2:
      for n in ("ring g2 half",):
        cfg, defs = next((c, d) for m, c, d in VARS if m == n)
        la = lb.launcher(n + "stamp", defs | dict(STAMP=1)); wrap.CFG.update(BASE); wrap.CFG.pop("regs", None); wrap.CFG.update(cfg); L.launch_shape.cache_clear()
        for q in TYPES:
            for sn in ("o", "gu", "down"):
                N, K = lab.SHAPES[sn]; ws = lb.weight(q, (N, K)); x = lb.x.view((1, K)); R = 40
                ys = [lb.y.view((1, N + i)) for i in range(R)]
                def work():
                    for i in range(R): L.linear_rows(la, x, ws[i % len(ws)], ys[i], num_sms=132)
                us = lb.time(work) / R
                sp = L.spec(q, 1, L.launch_shape(q, 1, N, K, 132).depth); b.synchronize()
                ptr, size = b._calls("cuModuleGetGlobal", la._modules[-1], b"stamps")
                out = np.zeros(40 * 264 * 8, np.uint64)
                b._calls("cuMemcpyDtoH", out.ctypes.data, ptr, out.nbytes)
                nb = L.launch_shape(q, 1, N, K, 132).blocks
                st = out.reshape(40, 264, 8)[:, :nb, [0,1,2,6,3,4,5]].astype(np.int64)
                rel = [st[i] - st[i, :, 2].min() for i in range(15, 35)]
                gap = [st[i + 1, :, 2].min() - st[i, :, 6].max() for i in range(15, 35)]
                mm = np.median([np.stack([r.min(0), np.median(r, 0), r.max(0)]) for r in rel], 0).astype(int)
                print(n, q, sn, f"{us:.1f} us; last end to next wait {np.median(gap):.0f} ns; start issued waited xthere staged multiplied end", *mm.tolist(), flush=True)
