"""Stand in for a set of rows whose map is slow on rank 0, and notes the order in which the processes come."""

import os
import time


class Rows:
    def map(self, function):
        time.sleep(1 - int(os.environ["RANK"]))
        with open("order", "a") as file:
            file.write(os.environ["RANK"])
        return self
