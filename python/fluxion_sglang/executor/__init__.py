"""Decode: executors that pull tasks from one queue, and the engine that runs a layer."""
