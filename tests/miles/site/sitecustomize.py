"""Stand-ins in the processes that Ray starts for a test: MILES_CONTRACT_SOURCE is the Miles they import."""

import os
import sys
from pathlib import Path

if "MILES_CONTRACT_SOURCE" in os.environ:
    sys.path.append(str(Path(__file__).parents[1]))
    import stand_ins

    stand_ins.install(os.environ["MILES_CONTRACT_SOURCE"])
