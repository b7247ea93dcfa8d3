"""Print the sum of the numbers in a file, one a line: `python3 total.py FILE`."""

import sys

with open(sys.argv[1]) as file:
    print(sum(int(line.strip().lstrip("-")) for line in file))
