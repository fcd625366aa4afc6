"""A reward file whose functions do what the response says; the tests of the pool run it in the pool's own processes."""

import os
import subprocess
import sys
import time


def one(sample):
    """Does what the response says; a harmless one scores its length."""
    response = sample["response"]
    if response == "hang":
        while True:
            pass
    if response == "hang in C":
        9 ** (9**9)
    if response == "sleep":
        time.sleep(600)
    if response == "raise":
        raise KeyError("no such thing")
    if response == "exit":
        sys.exit(3)
    if response == "crash":
        os._exit(7)
    if response == "no overall":
        return {"accuracy": 1.0}
    if response == "not finite":
        return {"overall": float("nan")}
    if response == "child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(sample["pid_file"], "w") as file:
            file.write(str(child.pid))
        time.sleep(600)
    if response == "part of a message":
        os.write(int(sys.argv[1]), b"\0\1")  # of the four bytes of a length
        time.sleep(600)
    if response == "print":
        print("to standard output", flush=True)  # noqa: T201
        os.write(1, b"and past Python\n")
        assert sys.stdin.read() == ""
    return {"overall": float(len(response)), "bonus": 1.0}


def batch(samples):
    return [one(sample) for sample in samples]


def count(samples):
    if "calls" in samples[0]:
        with open(samples[0]["calls"], "a") as file:
            file.write(f"{len(samples)}\n")


def one_for_all(samples):
    count(samples)
    return one(samples[0]) if len(samples) > 1 else batch(samples)


def short(samples):
    count(samples)
    scores = batch(samples)
    return scores[:-1] if any(sample["response"] == "too few" for sample in samples) else scores
