"""Stands for a worker process: does no problem, and at some of them what a broken kernel does to a process. No PyTorch, so it is quick.

Arguments: what happens ("crash", "hang"), and at which problem.
"""

import json
import os
import signal
import sys
import time


def main() -> None:
    what, bad = sys.argv[1], int(sys.argv[2])
    order = json.loads(sys.stdin.readline())
    task = order["task"]
    own = [n for n in range(task["number"], task["variants"], task["workers"]) if n not in task["without"]]
    bunches = [[index] for index in task["only"] or ()]
    for step in range(task["first_round"], 6):
        if task["only"] is None:
            for number in own:
                first = number + task["variants"] * step * task["bunch"]
                bunches.append([first + task["variants"] * n for n in range(task["bunch"])])
    for indices in bunches:
        print(json.dumps({"kind": "at", "round": task["first_round"], "indices": indices}), flush=True)
        if bad in indices:
            if what == "hang":
                time.sleep(600)
            print("CUDA error: an illegal memory access was encountered", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGABRT)
        print(json.dumps({"kind": "done", "count": len(indices), "seconds": 0.0, "traits": {}}), flush=True)


main()
