-- A call of a provider is over: its place is free, its tokens are settled, and what it tells of the provider is kept for all.
--
-- KEYS   1 state, 2 calls, 3 waiting, 4 seen
-- ARGV   call, tenant, tokens that were reserved and not used (negative: more were), outcome, wait_ms, error as JSON,
--        failures in a row from which on the provider is held back
--        outcome: ok       it answered, if only to refuse the request
--                 limited  it asks for wait_ms of patience (0: it does not say how long)
--                 outage   it could not be reached, or answered that it cannot answer
--                 unknown  the call was stopped before it told anything
-- Returns  until when the provider is held back, in ms of the engine's clock; 0 where it is not
local redis_call, state = redis.call, KEYS[1]
local me, unused, outcome, wait_ms = ARGV[1] .. '|' .. ARGV[2], ARGV[3] + 0, ARGV[4], ARGV[5] + 0
local clock = redis_call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local first_ms, most_ms, keep_ms = 1000, 300000, 3600000

redis_call('ZREM', KEYS[2], me)
redis_call('ZREM', KEYS[3], me)
redis_call('ZREM', KEYS[4], me)
if unused ~= 0 and redis_call('HEXISTS', state, 'tokens') == 1 then
  redis_call('HINCRBYFLOAT', state, 'tokens', unused)
end
if redis_call('HGET', state, 'probe') == me then redis_call('HDEL', state, 'probe', 'probe_until') end

local held_until = tonumber(redis_call('HGET', state, 'held_until') or 0)
if outcome == 'ok' then
  -- Not while it is held back: this call may have begun before that.
  if held_until <= now then redis_call('HDEL', state, 'failures', 'opened', 'limited', 'held_until', 'error') end
elseif outcome == 'limited' or outcome == 'outage' then
  local hold_ms
  if outcome == 'limited' then
    local times = redis_call('HINCRBY', state, 'limited', held_until > now and 0 or 1)
    hold_ms = wait_ms > 0 and wait_ms or math.min(most_ms, first_ms * 2 ^ math.max(0, times - 1))
  elseif redis_call('HINCRBY', state, 'failures', 1) >= ARGV[7] + 0 then
    -- Calls that were under way when it was held back fail with it, and must not make it longer.
    local times = redis_call('HINCRBY', state, 'opened', held_until > now and 0 or 1)
    hold_ms = math.max(wait_ms, math.min(most_ms, first_ms * 2 ^ math.max(0, times - 1)))
  end
  redis_call('HSET', state, 'error', ARGV[6])
  if hold_ms and now + hold_ms > held_until and not (held_until > now and wait_ms == 0) then
    held_until = now + math.floor(hold_ms)
    redis_call('HSET', state, 'held_until', held_until)
  end
end
if redis_call('EXISTS', state) == 1 then redis_call('PEXPIRE', state, keep_ms) end
return held_until > now and held_until or 0
