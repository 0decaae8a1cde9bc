"""Times variants of linear_rows. python scratch/lab.py FILE.json-like python list"""
import sys, shutil, tempfile, time, importlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
import numpy as np
from rollkv.backend import RmsNorm, Stream
from rollkv.cuda.backend import CudaBackend
from rollkv.cuda.device import Launcher
from rollkv.cuda.nvrtc import CubinCache, find_csrc
from rollkv.cuda.kernels import linear_rows as L
from rollkv.quants import device_bytes
from rollkv.cuda.weights_gpu import CudaWeight

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gu": (24576, 4096), "down": (4096, 12288)}
HEAD = (151936, 4096)

class Lab:
    def __init__(self, b, portable=False):
        self.b = b
        self.tmp = Path(tempfile.mkdtemp())
        self.x = b.upload("x", np.random.default_rng(0).standard_normal((1, 16384)).astype(np.float32))
        self.y = b.upload("y", np.zeros((1, 152000), np.float32))
        self.n = b.upload("n", np.ones((16384,), np.float32))
        self.weights = {}

    def launcher(self, name, defines, csrc=None, arch=None, carve=True):
        d = self.tmp / name.replace(" ", "_").replace("/", "_")
        shutil.copytree(csrc or find_csrc(), d)
        f = d / "linear_rows.cu"
        f.write_text("".join(f"#define {k} {v}\n" for k, v in defines.items()) + f.read_text())
        base = self.b.launcher
        la = Launcher(self.b._calls, arch or base.arch, base._streams, CubinCache(self.tmp / "cache", csrc=d))
        if carve:
            load = la._load
            def _load(spec, cubin):
                k = load(spec, cubin)
                self.b._calls("cuFuncSetAttribute", k.function, self.b._calls.bindings.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100)
                return k
            la._load = _load
        return la

    def weight(self, q, shape, least=160e6):
        key = (q, shape, least)
        if key not in self.weights:
            nb = device_bytes(q, shape); ws = []
            for i in range(int(least // nb) + 1):
                m = self.b.empty("w", (nb,), "u8")
                self.b._calls("cuMemsetD32Async", m.ptr, 0x211d221f, nb // 4, self.b._context.streams[Stream.COMPUTE])
                ws.append(CudaWeight("w", shape, q, m))
            self.weights[key] = ws
        return self.weights[key]

    def time(self, work, n=5):
        b = self.b
        work(); b.synchronize(); g = b.capture(work); ts = []
        for _ in range(n):
            t0 = b.record_timed(Stream.COMPUTE); b.replay(g); ts.append(b.elapsed_ms(t0, b.record_timed(Stream.COMPUTE)))
        b.release(g)
        return median(ts[1:]) * 1e3

    def one(self, la, q, shape, hot=False, rows=1):
        ws = self.weight(q, shape); ws = ws[:1] if hot else ws
        N, K = shape
        R = 40
        x, y = self.x.view((1, K)), self.y.view((1, N))
        def work():
            for i in range(R): L.linear_rows(la, x, ws[i % len(ws)], y, num_sms=132)
        return self.time(work) / R

    def layer(self, la, q):
        sets = [self.weight(q, s) for s in SHAPES.values()]
        x, qkv, ff = self.x.view((1, 4096)), self.y.view((1, 6144)), self.y.view((1, 12288))
        norm = RmsNorm(self.n.view((4096,)), 1e-6)
        R = 12
        def work():
            for i in range(R):
                a, o, gu, d = (s[i % len(s)] for s in sets)
                L.linear_rows(la, x, a, qkv, num_sms=132, norm=norm)
                L.linear_rows(la, qkv.view((1, 4096)), o, x, num_sms=132, add=True)
                L.glu_rows(la, x, (gu,), ff, num_sms=132, norm=norm, activation="silu")
                L.linear_rows(la, ff, d, x, num_sms=132, add=True)
        return self.time(work) / R

def main(variants, types, shapes=SHAPES, hot=True, head=False):
    with CudaBackend(0) as b:
        lab = Lab(b)
        las = {}
        t0 = time.time()
        def prep(v):
            v["setup"]()
        for v in variants:
            las[v["name"]] = lab.launcher(v["name"], v.get("defines", {}))
        specs = []
        for v in variants:
            v["apply"](L); L.launch_shape.cache_clear()
            specs.append((v["name"], [L.spec(q, 1, L._depth(q, 1)) for q in types if q in v.get("types", types)]))
        with ThreadPoolExecutor(16) as ex:
            cubins = list(ex.map(lambda a: a[0]._cache.get(a[1].source, (a[1].expression,), a[0].arch), [(las[n], s) for n, ss in specs for s in ss]))
        import re
        regs = {}
        for (n, s), c in zip([(n, s) for n, ss in specs for s in ss], cubins):
            regs[(n, s.expression)] = re.findall(r"Used (\d+) reg", c.log)[0] + ("" if "0 bytes spill stores" in c.log else "SPILL")
        print(f"compile {time.time()-t0:.1f} s", flush=True)
        for q in types:
            total = sum(device_bytes(q, s) for s in SHAPES.values())
            print(q, f"layer at 4300: {total/4300e3:.1f} us")
            print(f"{'variant':32} regs " + " ".join(f"{n:>11}" for n in shapes) + "   hot o   layer")
            for v in variants:
                if q not in v.get("types", types): continue
                v["apply"](L); L.launch_shape.cache_clear()
                la = las[v["name"]]
                cells = []
                try:
                    for n, s in shapes.items():
                        us = lab.one(la, q, s); cells.append(f"{us:6.1f} {device_bytes(q, s)/us/43e3*1:3.0f}%")
                    h = lab.one(la, q, SHAPES["o"], hot=True) if hot else 0
                    ly = lab.layer(la, q)
                    print(f"{v['name']:32} {regs[(v['name'], L.spec(q,1,L._depth(q,1)).expression)]:>4} " + " ".join(f"{c:>11}" for c in cells) + f" {h:6.1f} {ly:6.1f} {total/ly/43e3:4.0f}%", flush=True)
                except Exception as e:
                    print(v["name"], "FAILED", str(e)[:200], flush=True)
                    if "launched" not in str(e): raise
