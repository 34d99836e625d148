"""The constants of a configuration's data, and what they explain. `fedbraid.experiment.advice` chooses settings.

- `measurement`: `diagnose` trains for a few rounds, estimates the constants at some of them and tries single rounds;
- `advice`: `advise` turns constants and those trials into sentences and settings, without running anything;
- `verification`: `verify` trains with the configured and with the advised settings;
- `picture`: `diagnosis_figure` draws a diagnosis.
"""

from fedbraid.experiment.diagnosis.advice import Advice, Probe, Sentence, Settings, advise
from fedbraid.experiment.diagnosis.measurement import Diagnosis, diagnose
from fedbraid.experiment.diagnosis.picture import diagnosis_figure
from fedbraid.experiment.diagnosis.verification import goal_of, verify

__all__ = [
    "Advice",
    "Diagnosis",
    "Probe",
    "Sentence",
    "Settings",
    "advise",
    "diagnose",
    "diagnosis_figure",
    "goal_of",
    "verify",
]
