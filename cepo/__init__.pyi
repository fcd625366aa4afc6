from cepo.api import Evaluation as Evaluation
from cepo.api import evaluate as evaluate
from cepo.api import load_config as load_config
from cepo.api import merge as merge
from cepo.api import push as push
from cepo.config import RunConfig as RunConfig
from cepo.report.page import Run as Run
from cepo.report.page import open_run as open_run
from cepo.train import train as train
from cepo.trainer.callbacks import Callback as Callback

__version__: str
