"""Builds a world of the studies with its checkpoint, or makes its weights anew.

python3 -m lab.studies.worlds                                        # the chain world in build/chain, for lab/studies/chain.yaml
python3 -m lab.studies.worlds --make --ship --out build/made         # its weights: 16 minutes on 2 cores
python3 -m lab.studies.worlds --world chain-strong                   # the same with weights of `lab.studies.doses`
"""

from __future__ import annotations

import sys

from lab.studies.worlds.kinds import CHAIN, KINDS
from lab.worlds.__main__ import main

if __name__ == "__main__":
    sys.exit(main(kinds=KINDS, default=CHAIN.name, program="python3 -m lab.studies.worlds"))
