"""One timed run of samebits. usage: python run_samebits.py JOB.json [--off]; see throughput.py."""

import json
import pathlib
import sys

from samebits.cli.bench import measure

job = json.loads(pathlib.Path(sys.argv[1]).read_text())
print(json.dumps(measure(job["model"], job, 1, job["dtype"], exact="--off" not in sys.argv)))
