"""Stands in for the child of a tuning: what it does with an index is in the environment variable FAKE_TUNE (JSON)."""

import json
import os
import sys
import time

path, job = sys.argv[1], json.loads(sys.argv[2])
deeds = {int(index): deed for index, deed in json.loads(os.environ["FAKE_TUNE"]).items()}


def tell(**event: object) -> None:
    with open(path, "a") as file:
        file.write(json.dumps(event) + "\n")


for index in job["indices"]:
    tell(event="started", index=index)
    deed = deeds.get(index)
    if deed == "abort" or (deed == "abort in timing" and job["time"]):
        os.abort()
    if deed == "hang":
        time.sleep(60)
    if deed == "wrong":
        tell(event="failed", index=index, reason="differs")
        continue
    tell(event="verified", index=index)
if job["time"]:
    for index in job["indices"]:
        if deeds.get(index) != "wrong":
            ms = 10.0 / (1 + index % 7)
            statistic = {"median": ms, "low": ms, "high": ms, "repeats": 3}
            ratio = {"median": 10.0 / ms, "low": 1.0, "high": 20.0, "repeats": 3}
            for shape in job["shapes"]:
                if deeds.get(index) == f"wrong at {shape['length']}":
                    tell(event="failed", index=index, reason="differs")
                    continue
                tell(event="timed", index=index, length=shape["length"], time_ms=statistic, speed_ratio=ratio)
