"""Low-rank adapters: read from PEFT's files, kept, laid out on the device, and described to a step."""
