import sys; sys.path.insert(0, "scratch")
from pathlib import Path
import lab
def V(name, bps, d8, d4, **defs):
    def apply(L):
        L._BLOCKS_PER_SM = bps; L._DEPTH["Q8_0"] = d8; L._DEPTH["Q4_K"] = d4
    return dict(name=name, apply=apply, defines=defs)
vs = [V("base", 2, 8, 2), V("bps1", 1, 8, 2),
      V("bps2 pf1", 2, 8, 2, PF=1), V("bps1 pf1", 1, 8, 2, PF=1), V("bps1 pf2", 1, 8, 2, PF=2), V("bps1 pf2 d4", 1, 4, 1, PF=2), V("bps1 pf2 c8k", 1, 8, 2, PF=2, CHUNK=8192),
      V("minb4 bps2 d2 pf1", 2, 2, 1, PF=1, MINB=4), V("minb4 bps2 d2 pf2", 2, 2, 1, PF=2, MINB=4), V("minb3 bps1 d4 pf2", 1, 4, 1, PF=2, MINB=3),V("minb4 bps3 d2 pf1", 3, 2, 1, PF=1, MINB=4),
      V("minb4 bps4 d2", 4, 2, 1, MINB=4)]
lab.find_csrc = lambda: Path("scratch/csrc1")
lab.main(vs, ["Q8_0", "Q4_K"])
