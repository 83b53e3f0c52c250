"""What every test shares. Hypothesis is derandomised, so a failure repeats, and has no deadline, since machines are shared."""

import hypothesis

hypothesis.settings.register_profile("gradpack", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("gradpack")
