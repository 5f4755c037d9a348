"""A driver without Spark that competes for a checkpoint folder and counts from its newest checkpoint.

Arguments: the folder, the last number, and the seconds between two heartbeats; others wait for seven of them.
Exit codes: 0 it counted to the end, 3 another driver owns the folder, 4 another driver took it over.
"""

import sys
import time

import numpy as np

from sparkdl.config import CheckpointConfig
from sparkdl.driver import lease
from sparkdl.driver.checkpoints import Checkpoints, Description, Saved
from sparkdl.errors import CheckpointError
from sparkdl.server.state import RowsHeld, Snapshot

folder, last, beat = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
lease.BEAT_SECONDS, lease.SILENCE_SECONDS, lease.POLL_SECONDS = beat, 7 * beat, beat / 3
description = Description({"metrics": {}}, 0.1, [], "")
mine = lease.lease_of(folder, None)
code = 3
try:
    mine.acquire()
    mine.start()
    code = 4
    checkpoints = Checkpoints(CheckpointConfig(folder, keep=10000), None, fresh=False, lease=mine)
    found = checkpoints.newest({}, description)
    count = 0 if found is None else found.snapshot.version
    while count < last:
        count += 1
        snapshot = Snapshot(0, np.full(3, count, np.float32), np.zeros(1, np.float32), count, 0.0)
        history = {"process": [mine.me.id]}  # no two drivers write the same bytes
        saved = Saved(
            settings={},
            first=(0, 0.0),
            snapshot=snapshot,
            held=(RowsHeld(1),),
            learning_rate=0.1,
            history=history,
            epochs=[],
            training={},
            counters={},
            stopped=False,
            description=description,
        )
        checkpoints.save(saved, wait=True)
        checkpoints.require_owned()
        time.sleep(0.02)
    checkpoints.close()
    checkpoints.require_owned()
    code = 0
except CheckpointError as error:
    sys.stderr.write(f"{error}\n")
finally:
    mine.release()
sys.exit(code)
