"""Advice for a configuration: a pilot over methods and rates that says which to use.

- `candidates`: the methods, where the search of each begins, and what a setting is in a configuration;
- `averaging`: four of the methods as one program;
- `screening`: what the constants of the data say before anything runs;
- `ranking`: which curve needs the fewest rounds when the target is not known;
- `race`: settings of all methods run to growing horizons;
- `pilot`: the whole procedure; `doubts`: when its answer is wrong or not certain;
- `advising`: the folder of a pilot; `summary` and `picture` of it;
- `federation`: plans and decisions for a federation that cannot be simulated.
"""
