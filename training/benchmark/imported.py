"""Imports a module in a process that has imported nothing else of this package, and prints
the seconds as JSON.
"""

import importlib
import json
import sys
import time

if __name__ == "__main__":
    wall, cpu = time.perf_counter(), time.process_time()
    importlib.import_module(sys.argv[1])
    seconds = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    print(json.dumps({f"{name}_seconds": value for name, value in seconds.items()}))
