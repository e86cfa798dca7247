"""What a step really takes: its memory and its time, measured."""
