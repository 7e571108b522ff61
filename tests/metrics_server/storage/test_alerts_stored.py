from __future__ import annotations

from dataclasses import replace

import pytest

from steptron_metrics.results import Alert
from steptron_metrics.storage.sql_store import SqlStore
from tests.metrics_server.storage.made import iteration

ALERT = Alert(
    number=1,
    run="run",
    rule="blow-up",
    severity="critical",
    subject="layer 44 expert 17",
    layer=44,
    item=17,
    since_iteration=10,
    since_ns=1000,
    last_iteration=12,
    ended_iteration=None,
    value=30.5,
    worst=40.25,
    threshold=10.0,
    saw="it's 30 times the median",
    cause="c",
    remedy="r",
    wants_checkpoint=True,
)


def test_alerts_come_back_the_latest_first(store: SqlStore) -> None:
    other = replace(ALERT, number=2, since_ns=2000, layer=None, item=None, wants_checkpoint=False, ended_iteration=13)
    elsewhere = replace(ALERT, run="else", since_ns=1500, value=float("inf"))
    store.put([iteration(1), iteration(1, run="else"), iteration(1, run="quiet")])
    store.put_alerts([ALERT, other, elsewhere])
    store.put_alerts([])
    assert store.alerts() == [other, elsewhere, ALERT]
    assert store.alerts("run") == [other, ALERT]
    assert store.alerts("run", open_only=True) == [ALERT]
    assert store.alerts(open_only=True) == [elsewhere, ALERT]
    assert store.alerts("quiet") == []
    assert {one.name: one.open_alerts for one in store.runs()} == {"run": 1, "else": 1, "quiet": 0}


def test_an_alert_is_replaced_by_its_number(store: SqlStore) -> None:
    store.put([iteration(1)])
    store.put_alerts([ALERT])
    ended = replace(ALERT, ended_iteration=20, last_iteration=19, worst=90.0, saw="over")
    store.put_alerts([replace(ALERT, saw="between"), ended])
    assert store.alerts("run") == [ended]
    assert store.runs()[0].open_alerts == 0


def test_alerts_go_with_their_run(store: SqlStore) -> None:
    store.put([iteration(1), iteration(1, run="else")])
    store.put_alerts([ALERT, replace(ALERT, run="else")])
    store.delete("run")
    assert [one.run for one in store.alerts()] == ["else"]
    with pytest.raises(KeyError):
        store.alerts("run")


def test_an_alert_may_come_before_its_run(store: SqlStore) -> None:
    store.put_alerts([replace(ALERT, run="early", saw="a\0b")])
    assert [one.saw for one in store.alerts("early")] == ["a�b"]
    store.delete("early")
    assert store.alerts() == []
