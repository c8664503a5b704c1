"""What the ranks did: clocks, the trace they gather, the bytes they hold, and profiles of the real model."""
