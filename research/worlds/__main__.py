"""Builds a world of the studies with its checkpoint, or makes its weights anew.

python3 -m research.worlds                                        # the chain world in build/chain, for research/chain.yaml
python3 -m research.worlds --make --ship --out build/made         # its weights: 16 minutes on 2 cores
python3 -m research.worlds --world chain-strong                   # the same with weights of `research.doses`
"""

from __future__ import annotations

import sys

from lab.worlds.__main__ import main
from research.worlds.kinds import CHAIN, KINDS

if __name__ == "__main__":
    sys.exit(main(kinds=KINDS, default=CHAIN.name, program="python3 -m research.worlds"))
