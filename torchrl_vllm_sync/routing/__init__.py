"""Which replica a request goes to, from local counters. No I/O but the monitor's."""
