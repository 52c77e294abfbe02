-- Asks for leave to call a provider of models: within its limits, and not while it is held back.
--
-- Of those that wait, whose tenant has the fewest calls under way comes first, then who has waited longest. A leave ends by
-- itself when it is not renewed. A minute's limit is a bucket that holds a tenth of it and is filled with the rest, so no
-- minute has more; a call above what the bucket holds waits for a full one and leaves a debt. Behind an outage one call
-- alone goes first.
--
-- KEYS   1 state, 2 calls, 3 waiting, 4 seen
-- ARGV   call, tenant, leave_ms, concurrency, requests per minute, tokens per minute (0: no limit), tokens
-- Returns  {0}                   go
--          {1, wait_ms}          ask again then
--          {2, wait_ms, error}   held back for so long; error is the provider's last one, as JSON
local redis_call, state, calls, waiting, seen = redis.call, KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local me = ARGV[1] .. '|' .. ARGV[2]
local concurrency, requests, tokens, wanted = ARGV[4] + 0, ARGV[5] + 0, ARGV[6] + 0, ARGV[7] + 0
local clock = redis_call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local unseen_ms, keep_ms = 3000, 3600000

local fields = redis_call('HMGET', state, 'held_until', 'error', 'opened', 'probe', 'probe_until')
local held_until, opened = tonumber(fields[1] or 0), tonumber(fields[3] or 0)
if held_until > now then return { 2, held_until - now, fields[2] or '' } end
if opened > 0 and fields[4] and fields[4] ~= me and tonumber(fields[5] or 0) > now then return { 1, 200 } end

redis_call('ZREMRANGEBYSCORE', calls, '-inf', now)
for _, lost in ipairs(redis_call('ZRANGEBYSCORE', seen, '-inf', now - unseen_ms)) do
  redis_call('ZREM', seen, lost)
  redis_call('ZREM', waiting, lost)
end

local function bucket(name, per_minute)
  -- What is left, and how much comes in a millisecond.
  local holds = math.max(1, math.floor(per_minute / 10))
  local rate = math.max(per_minute - holds, per_minute / 2) / 60000
  local kept = redis_call('HMGET', state, name, name .. '_at')
  local left = holds
  if kept[1] then left = math.min(holds, kept[1] + (now - kept[2]) * rate) end
  return left, rate, holds
end

local function wait(ms)
  redis_call('ZADD', waiting, 'NX', now, me)
  redis_call('ZADD', seen, now, me)
  redis_call('PEXPIRE', waiting, keep_ms)
  redis_call('PEXPIRE', seen, keep_ms)
  return { 1, math.max(10, math.ceil(ms)) }
end

local function place()
  -- Among those that wait: 1 for the first.
  local under_way = {}
  for _, name in ipairs(redis_call('ZRANGE', calls, 0, -1)) do
    local tenant = string.match(name, '|(.*)$')
    under_way[tenant] = (under_way[tenant] or 0) + 1
  end
  -- Each one of a tenant counts as a call of it for those behind. In the order of their times, so the first is first.
  local since = redis_call('ZSCORE', waiting, me) or tostring(now)
  local ranks, mine = {}, nil
  local others = redis_call('ZRANGE', waiting, 0, -1, 'WITHSCORES')
  for index = 1, #others, 2 do
    local name = others[index]
    local tenant = string.match(name, '|(.*)$')
    local count = under_way[tenant] or 0
    under_way[tenant] = count + 1
    if name == me then mine = count else ranks[#ranks + 1] = { count, others[index + 1] + 0, name } end
  end
  mine = mine or under_way[ARGV[2]] or 0
  local ahead = 0
  for _, rank in ipairs(ranks) do
    local earlier = rank[2] < since + 0 or (rank[2] == since + 0 and rank[3] < me)
    if rank[1] < mine or (rank[1] == mine and earlier) then ahead = ahead + 1 end
  end
  return ahead + 1
end

local position = redis_call('ZCARD', waiting) == 0 and 1 or place()
if concurrency > 0 and position > concurrency - redis_call('ZCARD', calls) then return wait(100) end
local requests_left, tokens_left
if requests > 0 then
  local rate
  requests_left, rate = bucket('requests', requests)
  if requests_left < position then return wait((position - requests_left) / rate) end
end
if tokens > 0 then
  local rate, holds
  tokens_left, rate, holds = bucket('tokens', tokens)
  local needed = math.min(wanted * position, holds)
  if tokens_left < needed then return wait((needed - tokens_left) / rate) end
end

if requests_left then redis_call('HSET', state, 'requests', requests_left - 1, 'requests_at', now) end
if tokens_left then redis_call('HSET', state, 'tokens', tokens_left - wanted, 'tokens_at', now) end
if opened > 0 then redis_call('HSET', state, 'probe', me, 'probe_until', now + ARGV[3]) end
redis_call('ZREM', waiting, me)
redis_call('ZREM', seen, me)
redis_call('ZADD', calls, now + ARGV[3], me)
redis_call('PEXPIRE', calls, keep_ms)
if redis_call('EXISTS', state) == 1 then redis_call('PEXPIRE', state, keep_ms) end
return { 0 }
