-- Commits what the machine decided for a batch of sessions: state, transcript, events, tasks, records, timers and the
-- acknowledgement of the messages that caused them land together, or not at all.
--
-- KEYS   1 inbox, 2 results, 3.. whatever the items refer to by number
-- ARGV   group, now_ms, number of items; then for each item:
--          position of the next item, session key number, expected version, guard key number (0: none),
--          live ('-': unchanged), state ('': unchanged), number of messages, (stream key number, entry id)...,
--          number of effects, effects...
--        an effect is a letter and its arguments (key means a number in KEYS):
--          E key create ttl_ms n (type body)...      append events to a channel and publish them
--          X key type body                           add a task to a stream
--          B key clock_key tenant priority body      put a model task into the pool's backlog
--          L key n value...                          append to a transcript
--          H key ttl_ms n (field value)...           set fields of a record
--          T key score member                        set a timer, or an entry of an index
--          R key member                              remove a timer
--          F key length n (type body)                append to the lifecycle feed
--          N key field                               count
-- Returns  one number for each item: the new version, -1 where the session has another version (nothing was written),
--          -2 where the guard key exists (nothing was written)
local call, K, A = redis.call, KEYS, ARGV
local group, now = A[1], A[2]
local result, acknowledged = {}, {{}, {}}
local a = 4

local function append_events(key, create, ttl, count)
  local first
  local lines = {}
  for _ = 1, count do
    local kind, body = A[a], A[a + 1]
    a = a + 2
    local id
    if create == '1' and not first then
      id = call('XADD', key, '0-*', 't', kind, 'd', body, 'at', now)
    else
      id = call('XADD', key, 'NOMKSTREAM', '0-*', 't', kind, 'd', body, 'at', now)
    end
    if id then
      first = first or id
      lines[#lines + 1] = kind .. ' ' .. now .. ' ' .. #body .. '\n' .. body .. '\n'
    end
  end
  if first then
    call('SPUBLISH', key, string.sub(first, 3) .. '\n' .. table.concat(lines))
    if ttl ~= '0' then call('PEXPIRE', key, ttl) end
  end
end

local function enqueue(backlog, clock, tenant, priority, body)
  -- Start-time fair queueing: a tenant's next task comes one place behind its last one, but never before the place
  -- that was dispatched last; a higher priority is a class of its own.
  local places = call('HMGET', clock, 'now', 't:' .. tenant)
  local place = math.max(tonumber(places[1] or 0), tonumber(places[2] or 0)) + 1
  call('HSET', clock, 't:' .. tenant, place)
  call('ZADD', backlog, place - priority * 1e12, body)
end

local effects = {
  E = function()
    local key, create, ttl, count = K[tonumber(A[a])], A[a + 1], A[a + 2], tonumber(A[a + 3])
    a = a + 4
    append_events(key, create, ttl, count)
  end,
  X = function()
    call('XADD', K[tonumber(A[a])], '*', 't', A[a + 1], 'd', A[a + 2])
    a = a + 3
  end,
  B = function()
    enqueue(K[tonumber(A[a])], K[tonumber(A[a + 1])], A[a + 2], tonumber(A[a + 3]), A[a + 4])
    a = a + 5
  end,
  L = function()
    local count = tonumber(A[a + 1])
    call('RPUSH', K[tonumber(A[a])], unpack(A, a + 2, a + 1 + count))
    a = a + 2 + count
  end,
  H = function()
    local key, ttl, count = K[tonumber(A[a])], A[a + 1], tonumber(A[a + 2])
    call('HSET', key, unpack(A, a + 3, a + 2 + 2 * count))
    if ttl ~= '0' then call('PEXPIRE', key, ttl) end
    a = a + 3 + 2 * count
  end,
  T = function()
    call('ZADD', K[tonumber(A[a])], A[a + 1], A[a + 2])
    a = a + 3
  end,
  R = function()
    call('ZREM', K[tonumber(A[a])], A[a + 1])
    a = a + 2
  end,
  F = function()
    call('XADD', K[tonumber(A[a])], 'MAXLEN', '~', A[a + 1], '*', 't', A[a + 2], 'd', A[a + 3])
    a = a + 4
  end,
  N = function()
    call('HINCRBY', K[tonumber(A[a])], A[a + 1], 1)
    a = a + 2
  end,
}

-- An item that is refused writes nothing: its end is given, so that the next one is found without reading its effects.
for i = 1, tonumber(A[3]) do
  local item_end = tonumber(A[a])
  local session, version, guard = K[tonumber(A[a + 1])], A[a + 2], tonumber(A[a + 3])
  local live, state, messages = A[a + 4], A[a + 5], tonumber(A[a + 6])
  a = a + 7
  if (call('HGET', session, 'v') or '0') ~= version then
    result[i] = -1
  elseif guard > 0 and call('EXISTS', K[guard]) == 1 then
    result[i] = -2
  else
    for _ = 1, messages do
      local source = tonumber(A[a])
      call('XACK', K[source], group, A[a + 1])
      local ids = acknowledged[source]
      ids[#ids + 1] = A[a + 1]
      a = a + 2
    end
    local new = tonumber(version) + 1
    if state == '' then
      call('HSET', session, 'v', new)
    elseif live == '-' then
      call('HSET', session, 'v', new, 's', state)
    else
      call('HSET', session, 'v', new, 's', state, 'live', live, 'offset', 0)
    end
    local count = tonumber(A[a])
    a = a + 1
    for _ = 1, count do
      local effect = effects[A[a]]
      a = a + 1
      effect()
    end
    result[i] = new
  end
  a = item_end
end
for source = 1, 2 do
  if #acknowledged[source] > 0 then call('XDEL', K[source], unpack(acknowledged[source])) end
end
return result
