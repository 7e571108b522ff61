CREATE TABLE runs (
    id INTEGER PRIMARY KEY,
    name VARCHAR NOT NULL UNIQUE,
    first_iteration BIGINT NOT NULL,
    last_iteration BIGINT NOT NULL,
    iterations BIGINT NOT NULL,
    partial BIGINT NOT NULL,
    world_size INTEGER NOT NULL,
    consumed_tokens BIGINT NOT NULL,
    started_ns BIGINT NOT NULL,
    last_ended_ns BIGINT NOT NULL
);

-- When each session began, and its first iteration that was stored: earlier sessions end before it.
CREATE TABLE sessions (
    run INTEGER NOT NULL,
    session_ns BIGINT NOT NULL,
    first_iteration BIGINT NOT NULL,
    PRIMARY KEY (run, session_ns)
);

-- The ledger: what is stored, and is never stored twice.
CREATE TABLE iterations (
    run INTEGER NOT NULL,
    iteration BIGINT NOT NULL,
    session_ns BIGINT NOT NULL,
    world_size INTEGER NOT NULL,
    num_ranks INTEGER NOT NULL,
    missing INTEGER[] NOT NULL,
    ended_ns BIGINT NOT NULL,
    seconds DOUBLE NOT NULL,
    consumed_tokens BIGINT NOT NULL,
    dropped BIGINT NOT NULL,
    PRIMARY KEY (run, iteration)
);

CREATE TABLE events (
    run INTEGER NOT NULL,
    iteration BIGINT NOT NULL,
    number INTEGER NOT NULL,
    kind VARCHAR NOT NULL,
    detail VARCHAR NOT NULL
);

CREATE TABLE alerts (
    run VARCHAR NOT NULL,
    number BIGINT NOT NULL,
    rule VARCHAR NOT NULL,
    severity VARCHAR NOT NULL,
    subject VARCHAR NOT NULL,
    layer INTEGER,
    item INTEGER,
    since_iteration BIGINT NOT NULL,
    since_ns BIGINT NOT NULL,
    last_iteration BIGINT NOT NULL,
    ended_iteration BIGINT,
    value DOUBLE NOT NULL,
    worst DOUBLE NOT NULL,
    threshold DOUBLE NOT NULL,
    saw VARCHAR NOT NULL,
    cause VARCHAR NOT NULL,
    remedy VARCHAR NOT NULL,
    wants_checkpoint BOOLEAN NOT NULL,
    PRIMARY KEY (run, number)
);

-- What rows of the levels are about. kind 0: aggregates of a metric and layer, items are the metric's. kind 1: a derived
-- figure, layer is -1 and item i is layer i - 1.
CREATE TABLE series (
    id INTEGER PRIMARY KEY,
    run INTEGER NOT NULL,
    kind INTEGER NOT NULL,
    name VARCHAR NOT NULL,
    layer INTEGER NOT NULL,
    width INTEGER NOT NULL,
    UNIQUE (run, kind, name, layer)
);

-- Rows of level 1 are iterations, those of level F buckets of F iterations from `iteration` on; see rollup.py and
-- packing.py. Lists have one element an item, `width` of them. A count_* of one element holds for all items; a NULL
-- statistic is what the mean says. min_low is min_value, max_high is max_value. count_value of a bucket is the
-- sum over its iterations.
-- New rows come to *_recent in the order of their arrival. Now and then they are moved to *_history in the order of series,
-- so that a query about one of them finds its rows side by side.
CREATE TABLE level_1_recent (
    series INTEGER NOT NULL,
    iteration BIGINT NOT NULL,
    width INTEGER NOT NULL,
    count_value INTEGER[],
    mean_value FLOAT[],
    rms_value FLOAT[],
    min_value FLOAT[],
    median_value FLOAT[],
    max_value FLOAT[],
    p99_value FLOAT[],
    which INTEGER[]
);
CREATE TABLE level_1_history (
    series INTEGER NOT NULL,
    iteration BIGINT NOT NULL,
    width INTEGER NOT NULL,
    count_value INTEGER[],
    mean_value FLOAT[],
    rms_value FLOAT[],
    min_value FLOAT[],
    median_value FLOAT[],
    max_value FLOAT[],
    p99_value FLOAT[],
    which INTEGER[]
);
CREATE VIEW level_1 AS SELECT * FROM level_1_recent UNION ALL SELECT * FROM level_1_history;

CREATE TABLE level_16_recent (
    series INTEGER NOT NULL,
    iteration BIGINT NOT NULL,
    width INTEGER NOT NULL,
    iterations INTEGER NOT NULL,
    count_value INTEGER[],
    count_low INTEGER[],
    count_high INTEGER[],
    mean_value FLOAT[],
    mean_low FLOAT[],
    mean_high FLOAT[],
    rms_value FLOAT[],
    rms_low FLOAT[],
    rms_high FLOAT[],
    min_value FLOAT[],
    min_high FLOAT[],
    median_value FLOAT[],
    median_low FLOAT[],
    median_high FLOAT[],
    max_value FLOAT[],
    max_low FLOAT[],
    p99_value FLOAT[],
    p99_low FLOAT[],
    p99_high FLOAT[]
);
CREATE TABLE level_16_history (
    series INTEGER NOT NULL,
    iteration BIGINT NOT NULL,
    width INTEGER NOT NULL,
    iterations INTEGER NOT NULL,
    count_value INTEGER[],
    count_low INTEGER[],
    count_high INTEGER[],
    mean_value FLOAT[],
    mean_low FLOAT[],
    mean_high FLOAT[],
    rms_value FLOAT[],
    rms_low FLOAT[],
    rms_high FLOAT[],
    min_value FLOAT[],
    min_high FLOAT[],
    median_value FLOAT[],
    median_low FLOAT[],
    median_high FLOAT[],
    max_value FLOAT[],
    max_low FLOAT[],
    p99_value FLOAT[],
    p99_low FLOAT[],
    p99_high FLOAT[]
);
CREATE VIEW level_16 AS SELECT * FROM level_16_recent UNION ALL SELECT * FROM level_16_history;

CREATE TABLE level_256_recent (
    series INTEGER NOT NULL,
    iteration BIGINT NOT NULL,
    width INTEGER NOT NULL,
    iterations INTEGER NOT NULL,
    count_value INTEGER[],
    count_low INTEGER[],
    count_high INTEGER[],
    mean_value FLOAT[],
    mean_low FLOAT[],
    mean_high FLOAT[],
    rms_value FLOAT[],
    rms_low FLOAT[],
    rms_high FLOAT[],
    min_value FLOAT[],
    min_high FLOAT[],
    median_value FLOAT[],
    median_low FLOAT[],
    median_high FLOAT[],
    max_value FLOAT[],
    max_low FLOAT[],
    p99_value FLOAT[],
    p99_low FLOAT[],
    p99_high FLOAT[]
);
CREATE TABLE level_256_history (
    series INTEGER NOT NULL,
    iteration BIGINT NOT NULL,
    width INTEGER NOT NULL,
    iterations INTEGER NOT NULL,
    count_value INTEGER[],
    count_low INTEGER[],
    count_high INTEGER[],
    mean_value FLOAT[],
    mean_low FLOAT[],
    mean_high FLOAT[],
    rms_value FLOAT[],
    rms_low FLOAT[],
    rms_high FLOAT[],
    min_value FLOAT[],
    min_high FLOAT[],
    median_value FLOAT[],
    median_low FLOAT[],
    median_high FLOAT[],
    max_value FLOAT[],
    max_low FLOAT[],
    p99_value FLOAT[],
    p99_low FLOAT[],
    p99_high FLOAT[]
);
CREATE VIEW level_256 AS SELECT * FROM level_256_recent UNION ALL SELECT * FROM level_256_history;
