"""math-verify as a process of its own, run by path: a line of JSON [answer, text] in, a line true or false out.

Some expressions take forever to evaluate (9^{9^9}); only a process can be stopped in the midst of one.
"""

import json
import sys

from math_verify import parse, verify

for line in sys.stdin:
    answer, text = json.loads(line)
    found = parse(text, parsing_timeout=None)
    print(json.dumps(bool(verify(parse(answer, parsing_timeout=None), found, timeout_seconds=None))), flush=True)
