"""Forecasts as messages."""

from fencepost.v1 import admin_pb2
from fencepost.v1 import admin_service_pb2 as pb

from fencepost_server.api.wire_time import to_timestamp
from fencepost_server.engine.forecast import Forecast, Peak


def write_forecast(forecast: Forecast) -> pb.GetForecastResponse:
    """The whole answer."""
    return pb.GetForecastResponse(
        start_at=to_timestamp(forecast.start_at),
        fires_per_minute=forecast.fires_per_minute,
        peaks=[_peak(peak) for peak in forecast.peaks],
        computed_at=to_timestamp(forecast.computed_at),
    )


def _peak(peak: Peak) -> admin_pb2.ForecastPeak:
    return admin_pb2.ForecastPeak(
        minute_at=to_timestamp(peak.minute_at),
        fires=peak.fires,
        shares=[
            admin_pb2.ForecastShare(rule=share.rule, jobs=share.jobs, fires=share.fires)
            for share in peak.shares
        ],
    )
