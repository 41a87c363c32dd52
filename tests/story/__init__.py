"""A simulator of fleets: plays stories, written as YAML files, through the real engine, schedule, store and judge.

Only hardware, the worker process and time are replaced; everything that remembers or decides is canaryd's own.
"""
