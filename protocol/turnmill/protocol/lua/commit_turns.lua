-- Commits what the machine decided for a batch of sessions: state, transcript, events, tasks, records, timers and the
-- acknowledgement of the messages that caused them land together, or not at all.
--
-- KEYS   1 inbox, 2 results, 3.. whatever the items refer to by number
-- ARGV   group, now_ms, number of items, writer; then for each item:
--          position of the next item, session key number, expected version, expected writer, guard key number (0: none),
--          live ('-': unchanged), state ('': unchanged), number of messages, (stream key number, entry id)...,
--          number of effects, effects...
--        an effect is a letter and its arguments (key means a number in KEYS):
--          E key create ttl_ms n header type... body...   append events to a channel and publish them; the header is
--                                                    'type length' of each event, joined by spaces
--          X key type body                           add a task to a stream
--          B key clock_key tenant priority body      put a model task into the pool's backlog
--          L key n value...                          append to a transcript
--          H key ttl_ms n (field value)...           set fields of a record
--          T key score member                        set a timer, or an entry of an index
--          R key member                              remove a timer
--          F key length n (type body)                append to the lifecycle feed
--          N key field                               count
--          I key field change                        add to a number of a hash; the field goes when it is not positive
--          C key turn                                delete an idempotency key, if it still stands for that turn
--          M key channel ttl_ms turn reason          mark a turn as stopped, and tell it
--          K key n key... name...                    keep blobs, and note their names in the session's set
--          O key ttl_ms name                         note among what a session owns that something (its name behind the
--                                                    partition's prefix) expires in ttl_ms
--          D key owned_key removal_key removed_owned_key removals_key base n key...
--                                                    delete a session: n keys at once; what its set of names (key) and
--                                                    its owned things name is put aside as a removal, for remove_session
-- Returns  one number for each item: the new version, -1 where the session has another version, or one of another writer
--          (nothing was written), -2 where the guard key exists (nothing was written)
-- Keys of another type in place of those that all sessions share are moved to `displaced:...` behind the partition's prefix,
-- and noted in its stream of dead letters: two more keys that are not passed.
-- Written for speed: the arguments are walked by one index in one chain, and digits are made numbers by adding 0.
local call, K, A = redis.call, KEYS, ARGV
local group, now = A[1], A[2]
local result, acknowledged = {}, {{}, {}}
local writer = A[4]
local a = 5

local function put(command, key, ...)
  -- A write to what all sessions of the partition share. A script is not rolled back, so a key of another type that stands
  -- there must not end it half-way: it is moved away as a whole, and noted as a dead letter.
  local reply = redis.pcall(command, key, ...)
  if type(reply) ~= 'table' or not reply.err then return reply end
  if not string.find(reply.err, 'WRONGTYPE', 1, true) then error(reply) end
  local base, kind = string.match(K[1], '^(.*})') .. ':', call('TYPE', key).ok
  local kept = base .. 'displaced:' .. string.sub(key, #base + 1) .. ':' .. now
  call('RENAME', key, kept)
  call('PEXPIRE', kept, 604800000)
  redis.pcall('XADD', base .. 'dead', '*', 'attempts', 1, 'reason', 'a ' .. kind .. ' stood in the way of ' .. command,
    'from', key, 'id', '', 't', kind, 'd', '', 'displaced', kept)
  return redis.pcall(command, key, ...)
end

local function enqueue(backlog, clock, tenant, priority, body)
  -- Start-time fair queueing: a tenant's next task comes one place behind its last one, but never before the place
  -- that was dispatched last; a higher priority is a class of its own.
  local places = call('HMGET', clock, 'now', 't:' .. tenant)
  local place = math.max(tonumber(places[1] or 0), tonumber(places[2] or 0)) + 1
  call('HSET', clock, 't:' .. tenant, place)
  put('ZADD', backlog, place - priority * 1e12, body)
end

local function put_aside(names, owned, removal, removed_owned, removals, base)
  -- A session may have very much, so nothing is looked at here; a new one of the same name begins with keys of its own.
  local function name_of(key) return string.sub(key, #base + 1) end
  if call('EXISTS', names) == 1 then call('RENAME', names, removal) end
  if call('EXISTS', owned) == 1 then
    call('RENAME', owned, removed_owned)
    call('SADD', removal, name_of(removed_owned))
  end
  if call('EXISTS', removal) == 1 then call('SADD', removals, name_of(removal)) end
end

-- An item that is refused writes nothing: its end is given, so that the next one is found without reading its effects.
for i = 1, A[3] + 0 do
  local item_end = A[a] + 0
  local session, version, guard = K[A[a + 1] + 0], A[a + 2], A[a + 4] + 0
  local live, state, messages = A[a + 5], A[a + 6], A[a + 7] + 0
  -- The writer counts too: a decision may be made on one that is still on its way, and if that one is refused, another
  -- writer may have reached the very version which was expected after it.
  local current = call('HMGET', session, 'v', 'w')
  if (current[1] or '0') ~= version or (current[2] or '') ~= A[a + 3] then
    result[i] = -1
  elseif guard > 0 and call('EXISTS', K[guard]) == 1 then
    result[i] = -2
  else
    a = a + 8
    for _ = 1, messages do
      local ids = acknowledged[A[a] + 0]
      ids[#ids + 1] = A[a + 1]
      a = a + 2
    end
    local new = version + 1
    -- A session that begins has no entries: what stands in its lists is of one whose record was lost.
    local begins = version == '0'
    if state == '' then
      -- What changes nothing on a session that does not exist leaves no trace of it.
      if version ~= '0' then call('HSET', session, 'v', new, 'w', writer) end
    elseif live == '-' then
      call('HSET', session, 'v', new, 'w', writer, 's', state)
    else
      call('HSET', session, 'v', new, 'w', writer, 's', state, 'live', live, 'offset', 0)
    end
    local effects = A[a] + 0
    a = a + 1
    for _ = 1, effects do
      local effect, key = A[a], K[A[a + 1] + 0]
      if effect == 'E' then
        local lifetime, count, header = A[a + 3], A[a + 4] + 0, A[a + 5]
        local first
        if A[a + 2] == '1' then
          a = a + 6
          first = call('XADD', key, '0-*', 't', A[a], 'd', A[a + count], 'at', now)
        else
          a = a + 6
          first = call('XADD', key, 'NOMKSTREAM', '0-*', 't', A[a], 'd', A[a + count], 'at', now)
        end
        -- A channel that is gone (deleted, flushed) stays gone: a new one would begin at 1 again.
        if first then
          for event = a + 1, a + count - 1 do
            call('XADD', key, 'NOMKSTREAM', '0-*', 't', A[event], 'd', A[event + count], 'at', now)
          end
          local bodies = table.concat(A, '', a + count, a + 2 * count - 1)
          call('SPUBLISH', key, string.sub(first, 3) .. ' ' .. now .. ' ' .. header .. '\n' .. bodies)
          if lifetime ~= '0' then call('PEXPIRE', key, lifetime) end
        end
        a = a + 2 * count
      elseif effect == 'X' then
        put('XADD', key, '*', 't', A[a + 2], 'd', A[a + 3])
        a = a + 4
      elseif effect == 'L' then
        local last = a + 2 + A[a + 2]
        if begins then
          call('UNLINK', key)
          begins = false
        end
        call('RPUSH', key, unpack(A, a + 3, last))
        a = last + 1
      elseif effect == 'T' then
        put('ZADD', key, A[a + 2], A[a + 3])
        a = a + 4
      elseif effect == 'H' then
        local last = a + 3 + 2 * A[a + 3]
        call('HSET', key, unpack(A, a + 4, last))
        if A[a + 2] ~= '0' then call('PEXPIRE', key, A[a + 2]) end
        a = last + 1
      elseif effect == 'F' then
        put('XADD', key, 'MAXLEN', '~', A[a + 2], '*', 't', A[a + 3], 'd', A[a + 4])
        a = a + 5
      elseif effect == 'R' then
        put('ZREM', key, A[a + 2])
        a = a + 3
      elseif effect == 'N' then
        put('HINCRBY', key, A[a + 2], 1)
        a = a + 3
      elseif effect == 'I' then
        if put('HINCRBY', key, A[a + 2], A[a + 3]) <= 0 then call('HDEL', key, A[a + 2]) end
        a = a + 4
      elseif effect == 'C' then
        local held = redis.pcall('GET', key)
        if type(held) == 'string' and string.sub(held, 1, #A[a + 2] + 1) == A[a + 2] .. ' ' then call('UNLINK', key) end
        a = a + 3
      elseif effect == 'M' then
        call('SET', key, A[a + 5], 'PX', A[a + 3])
        call('SPUBLISH', K[A[a + 2] + 0], A[a + 4] .. ' ' .. A[a + 5])
        a = a + 6
      elseif effect == 'K' then
        local count = A[a + 2] + 0
        for blob = a + 3, a + 2 + count do call('PERSIST', K[A[blob] + 0]) end
        call('SADD', key, unpack(A, a + 3 + count, a + 2 + 2 * count))
        a = a + 3 + 2 * count
      elseif effect == 'D' then
        put_aside(key, K[A[a + 2] + 0], K[A[a + 3] + 0], K[A[a + 4] + 0], K[A[a + 5] + 0], A[a + 6])
        local last = a + 7 + A[a + 7]
        for index = a + 8, last do call('UNLINK', K[A[index] + 0]) end
        a = last + 1
      elseif effect == 'O' then
        local left = call('PTTL', key)
        call('ZADD', key, now + A[a + 2], A[a + 3])
        if left ~= -2 then call('ZREMRANGEBYSCORE', key, '-inf', now) end
        if left < A[a + 2] + 0 then call('PEXPIRE', key, A[a + 2]) end
        a = a + 4
      elseif effect == 'B' then
        enqueue(key, K[A[a + 2] + 0], A[a + 3], A[a + 4] + 0, A[a + 5])
        a = a + 6
      else
        error('unknown effect ' .. tostring(effect))
      end
    end
    result[i] = new
  end
  a = item_end
end
for source = 1, 2 do
  if #acknowledged[source] > 0 then
    put('XACK', K[source], group, unpack(acknowledged[source]))
    put('XDEL', K[source], unpack(acknowledged[source]))
  end
end
return result
